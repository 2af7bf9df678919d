"""Texts to one vector for each of their tokens."""

from trio_pool_serve.tasks.embed import check_dimensions
from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import TokenEmbed


def _params(model: Model, job: PoolJob) -> TokenEmbed:
    check_dimensions(model, job.dimensions)
    return TokenEmbed(dimensions=job.dimensions, normalize=job.normalize)


TOKEN_EMBED = Task("token_embed", _params)
