"""Throughput of adapters on this machine: arms in processes of their own, interleaved and repeated."""
