"""A server for pooling models, built on structured concurrency."""

__version__ = "0.1.0"
