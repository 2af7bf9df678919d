"""Wire formats of the products whose clients can use this server."""
