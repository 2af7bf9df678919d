"""See ``kind.py``."""
