"""The tasks about one prompt: a vector, a vector per token, weights over the vocabulary, labels."""

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import Classify, Embed, TokenClassify, TokenEmbed


def check_dimensions(model: Model, dimensions: int | None) -> None:
    """Raise ``InvalidRequestError`` unless the model's vectors can be cut to that size."""
    limit = model.engine.dimensions
    if dimensions is not None and not 1 <= dimensions <= limit:
        raise InvalidRequestError(
            f"{{dimensions}} must be from 1 to {limit}, the model's own, not {dimensions}.", field="dimensions"
        )


def _embed_params(model: Model, job: PoolJob) -> Embed:
    check_dimensions(model, job.dimensions)
    return Embed(dimensions=job.dimensions, normalize=job.normalize)


def _token_embed_params(model: Model, job: PoolJob) -> TokenEmbed:
    check_dimensions(model, job.dimensions)
    return TokenEmbed(dimensions=job.dimensions, normalize=job.normalize)


EMBED = Task("embed", _embed_params)
TOKEN_EMBED = Task("token_embed", _token_embed_params)
SPARSE_EMBED = Task(
    "sparse_embed", lambda model, job: model.folder.spec.sparse_params(job.input_params.effective_input_type)
)
CLASSIFY = Task("classify", lambda _, job: Classify(job.activation))
TOKEN_CLASSIFY = Task("token_classify", lambda _, job: TokenClassify(job.activation))
