"""The benchmark of vectors' quality; ``python -m benchmarks.quality`` runs it."""
