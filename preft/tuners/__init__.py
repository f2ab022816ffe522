"""Adapters on Hugging Face models: attach one so that it acts by position."""
