"""Base models: the embedded default one, and finding a checkpoint by folder, name or hub id."""
