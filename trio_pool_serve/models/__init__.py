"""Kinds of model: one folder each, one line each in the registry."""
