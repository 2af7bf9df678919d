"""API keys, their limits, and the labels of clients without keys."""
