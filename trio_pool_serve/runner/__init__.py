"""How it is computed: loading, batch assembly, forward pass, poolers and heads, output copies."""
