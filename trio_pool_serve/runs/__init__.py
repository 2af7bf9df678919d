"""Runs: rows of a source are computed in windows, written to a sink in order, and committed, each exactly once."""
