"""Rewards that can be verified: answers, formats, unit tests in a sandbox, and functions of the user's own."""
