"""Embedding models that read images among the tokens of a text."""
