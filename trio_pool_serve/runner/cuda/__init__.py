"""Computing without padding, and from CUDA graphs."""
