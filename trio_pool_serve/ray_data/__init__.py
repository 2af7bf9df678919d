"""Pooling models for Ray Data: callable classes for ``Dataset.map_batches``, each with an engine in its actor.

``docs/ray.md`` describes them. Only the conversion of batches imports ray; the classes do not.
"""

from trio_pool_serve.ray_data.batch_tasks import Classify, Embed, Rerank, Score, Sparse, TokenEmbed
from trio_pool_serve.ray_data.bulk_runs import BulkRuns

__all__ = ["BulkRuns", "Classify", "Embed", "Rerank", "Score", "Sparse", "TokenEmbed"]
