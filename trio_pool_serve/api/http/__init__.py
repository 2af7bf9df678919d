"""Connections, bodies, authentication, errors, streaming."""
