"""What clients speak: one module per dialect, over the same tasks."""
