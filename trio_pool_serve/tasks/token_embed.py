"""Texts to one vector for each of their tokens."""

from trio_pool_serve.tasks.embed import check_dimensions
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import TokenEmbed


def token_embed_params(model: Model, *, dimensions: int | None, normalize: bool | None) -> TokenEmbed:
    """Return what to ask for. Raises ``InvalidRequestError`` for dimensions that the model does not have."""
    check_dimensions(model, dimensions)
    return TokenEmbed(dimensions=dimensions, normalize=normalize)
