"""Evaluation: lm-evaluation-harness models that keep the rule of positions, and whether a difference is real."""
