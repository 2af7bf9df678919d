"""Loading a model: its tokenizer, its renderer, its checkpoint, and the runner that computes it."""
