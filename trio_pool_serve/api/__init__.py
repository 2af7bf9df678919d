"""The HTTP API: one module per dialect, over the same tasks."""
