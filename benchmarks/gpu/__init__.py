"""Everything about the GPU path, in parts that fail alone; ``python -m benchmarks.gpu`` runs them."""
