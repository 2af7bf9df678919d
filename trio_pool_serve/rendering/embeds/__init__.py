"""Token embeddings sent by clients."""
