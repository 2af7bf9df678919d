"""What clients of text-embeddings-inference speak, the Hugging Face hub's among them."""
