"""BGE-M3: dense, sparse and token vectors from one forward pass."""
