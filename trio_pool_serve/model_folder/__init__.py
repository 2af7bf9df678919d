"""What the files of a model declare, read without loading it."""
