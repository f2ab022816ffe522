"""Serving: the Hugging Face path and the vLLM backend."""
