"""Benchmarks and profiling. May import everything; nothing imports it."""
