"""Measurements of trio_pool_serve; how to run them is in ``benchmarks/README.md``."""
