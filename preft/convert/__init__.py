"""Other tools' checkpoints into `preft` adapters, and back."""
