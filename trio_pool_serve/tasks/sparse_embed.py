"""Texts to weights over the vocabulary."""

from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PoolingParams


def _params(model: Model, job: PoolJob) -> PoolingParams:
    return model.folder.spec.sparse_params(job.reading.effective_input_type)


SPARSE_EMBED = Task("sparse_embed", _params)
