"""Measurements of trio_pool_serve; ``benchmarks/README.md`` says how to run them."""
