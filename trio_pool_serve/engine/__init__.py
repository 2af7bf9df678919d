"""Scheduling: the queue, admission, batching, and the loop that feeds the runner."""
