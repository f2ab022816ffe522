"""Seams and settings that need no machine-learning library."""
