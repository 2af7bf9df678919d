"""Learned sparse models: SPLADE, with and without inference for queries."""
