"""Cohere's API, versions 1 and 2."""
