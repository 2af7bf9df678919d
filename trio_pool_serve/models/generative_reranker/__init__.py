"""Generative rerankers: causal language models that score a query and a document."""
