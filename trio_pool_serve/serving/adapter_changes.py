"""How the adapters of served models change while the server runs."""

import logging
from collections.abc import Collection

from trio_pool_serve.errors import ConflictError, NotFoundError, require, require_request
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.serving.served_models import ServedModels

logger = logging.getLogger(__name__)


async def add_adapter(
    models: ServedModels,
    parent: str,
    adapter: ServedAdapter,
    *,
    replaces: bool = False,
    among: Collection[str] | None = None,
) -> ServedModel:
    """Add an adapter to the model named ``parent``, which is loaded if necessary; return the model.

    ``among`` are the names that the request's API key may use, ``None`` for all.

    Its files are read and a row is computed first; requests for it are refused with ``EngineLoadingError`` meanwhile.
    With ``replaces`` it then takes the place of an adapter of the same name, which computes requests until then. Raises
    ``NotFoundError``, ``ConflictError``, ``QuotaExceededError``, ``InvalidRequestError`` if the parent is an adapter
    itself, and as ``ServedModels.loaded`` and ``ServedAdapter.check``. Cancellation: at once; it is not added.
    """
    with models.use(parent, among=among) as use:
        served = use.served
        # Not a model that has the name ``*``.
        require(models.named(parent) is served, f"The model `{parent}` does not exist.", NotFoundError)
        require_request(use.adapter is None, f"`{parent}` is an adapter; a model is expected.", param="parent")
        if not (replaces and adapter.name in served.adapters):
            models.require_free(adapter.name)
            served.adapters[adapter.name] = adapter
        before = served.adapters[adapter.name]
        try:
            model = await models.loaded(use)
            await adapter.check(model.engine, models.maker.offload)
        except BaseException:
            if served.adapters.get(adapter.name) is adapter:
                del served.adapters[adapter.name]
            raise
    if models.named(adapter.name) is not served or served.adapters[adapter.name] is not before:
        raise ConflictError(f"The adapter `{adapter.name}` has been unloaded or replaced before it was loaded.")
    served.adapters[adapter.name] = adapter
    logger.info("%s: added the adapter %s", served.source.name, adapter.name)
    return served


def remove_adapter(served: ServedModel, name: str) -> None:
    """Free the name of an adapter. Requests that use it go on."""
    del served.adapters[name]
    logger.info("%s: removed the adapter %s", served.source.name, name)
