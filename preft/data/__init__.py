"""Prompts as rows: read, render, tokenise."""
