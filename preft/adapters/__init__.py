"""An adapter as a file and as a value: manifest, tensors, digest, base fingerprint, catalog."""
