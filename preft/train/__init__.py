"""Training of adapters, under the very rule that serves them."""
