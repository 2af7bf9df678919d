"""Pooling models for Ray Data: callable classes for ``Dataset.map_batches``, each with an engine in its actor.

``docs/ray.md`` says how to use them. Only what a batch is converted with imports ray; the classes do not.
"""

from trio_pool_serve.ray_data.batch_tasks import Classify, Embed, Rerank, Score, Sparse, TokenEmbed
from trio_pool_serve.ray_data.bulk_runs import BulkRuns

__all__ = ["BulkRuns", "Classify", "Embed", "Rerank", "Score", "Sparse", "TokenEmbed"]
