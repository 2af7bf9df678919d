"""Generative rerankers: causal language models that judge a query and a document."""
