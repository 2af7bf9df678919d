"""vLLM's pooling endpoints; Jina's and Cohere's rerankers too."""
