"""Processes of the server: launcher, listener, API workers, engine processes."""
