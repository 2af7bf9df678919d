"""Blocking work in threads: offloading, thread priorities, OpenMP."""
