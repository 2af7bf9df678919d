"""Embedding models: a transformer, pooling, and the modules after it."""
