"""Kinds of model: one folder each, one line each in the registry. ``files`` and ``loading`` are shared by all kinds."""
