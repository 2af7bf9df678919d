"""Computing batches: assembly, forward pass, heads, output copies."""
