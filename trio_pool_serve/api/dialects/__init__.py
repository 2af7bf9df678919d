"""Wire formats of the products whose clients are served."""
