"""What clients of Cohere speak, version 1 and 2."""
