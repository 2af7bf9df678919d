"""The engine in other processes."""
