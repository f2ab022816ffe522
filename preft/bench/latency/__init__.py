"""Latency of a served engine under load: arrivals at a rate, or as a trace has them."""
