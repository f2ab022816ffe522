"""Low-rank updates at planned rows, by plain name. Imports neither triton nor a device library."""
