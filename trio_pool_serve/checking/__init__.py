"""``trio-pool-serve check``: whether and how a model would be served, without a server."""
