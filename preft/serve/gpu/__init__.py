"""Serving on GPUs. Experimental: never run on one. See docs/concepts/kernels.md for what is shown and how."""
