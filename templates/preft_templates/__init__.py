"""Recipes, cards and examples that `preft init` and the converter copy. Data only."""
