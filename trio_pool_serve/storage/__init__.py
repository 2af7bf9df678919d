"""Data that outlives the process: a database on its own thread, durable files, and the cache of converted models."""
