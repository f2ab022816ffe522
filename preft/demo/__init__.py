"""The main job end to end on the embedded model: make adapters, serve them together, prove and measure."""
