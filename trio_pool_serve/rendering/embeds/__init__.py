"""Decoding of token embeddings that clients send."""
