"""Metrics, logs, traces, request timings, loop lag, and snapshots of all processes."""
