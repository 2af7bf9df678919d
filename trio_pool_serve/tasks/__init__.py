"""Tasks: pooling, scoring and tokenising, in terms of no dialect."""
