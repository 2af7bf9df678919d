"""The API of text-embeddings-inference, which the Hugging Face hub's clients use too."""
