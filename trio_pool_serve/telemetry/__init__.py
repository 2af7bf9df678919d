"""Metrics, request timings, loop lag, and snapshots of all processes."""
