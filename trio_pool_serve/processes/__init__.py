"""Child processes, worker processes, and the framed messages between them."""
