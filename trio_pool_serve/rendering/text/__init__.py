"""Tokenisation of texts and pairs."""
