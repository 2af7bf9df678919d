"""What clients of vLLM's pooling endpoints speak; Jina's and Cohere's rerankers too."""
