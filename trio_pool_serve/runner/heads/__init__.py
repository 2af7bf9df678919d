"""Heads: one module per kind of output."""
