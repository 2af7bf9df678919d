"""Tables that are read: where their files are, what is in them, row by row."""
