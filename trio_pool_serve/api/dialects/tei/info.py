"""``/info`` of text-embeddings-inference, which its clients request before they send any work."""

import re
from typing import TypeAlias

from attrs import frozen

import trio_pool_serve
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.config import ModelSource
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.model import Model

INFO_PATH = "/info"

COMMIT = re.compile(r"[0-9a-f]{40}")


@frozen(kw_only=True)
class EmbeddingType:
    """A model that makes vectors of texts, and how it pools them."""

    pooling: str


@frozen(kw_only=True)
class LabelsType:
    """A model that makes a number per label of texts, and the labels' names."""

    id2label: dict[str, str]
    label2id: dict[str, int]


ModelType: TypeAlias = dict[str, EmbeddingType | LabelsType]
"""One entry: ``embedding``, ``reranker`` or ``classifier``."""


@frozen(kw_only=True)
class Info:
    """The response. ``model_dtype`` is the setting.

    The last three are about builds and limits of text-embeddings-inference that this server does not have.
    """

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    max_batch_requests: int | None = None
    sha: str | None = None
    docker_label: str | None = None


def info_routes(service: Service) -> Routes:
    """Return the route over a service."""

    async def info(request: HttpRequest) -> HttpResponse:
        with service.models.use(among=request.models) as use:
            return HttpResponse.json(_described(service, await service.models.loaded(use.served), use.served.source))

    return {("GET", INFO_PATH): info}


MAX_CONCURRENT_REQUESTS = 512
"""TEI's own default."""


def _described(service: Service, model: Model, source: ModelSource) -> Info:
    config, commit = service.config, model.folder.path.name
    return Info(
        model_id=source.shown_location,
        model_sha=commit if COMMIT.fullmatch(commit) else None,
        model_dtype=model.computed_by.dtype or source.loading.dtype,
        served_model_name=model.name,
        model_type=_model_type(model),
        # Requests are limited by time and memory instead; clients read a number here.
        max_concurrent_requests=MAX_CONCURRENT_REQUESTS,
        max_input_length=model.renderer.max_model_len,
        max_batch_tokens=model.engine.facts.max_batch_tokens,
        max_client_batch_size=config.network.max_inputs_per_request,
        auto_truncate=model.long_text != "refuse",
        tokenization_workers=config.threads.renderer_num_workers,
        version=trio_pool_serve.__version__,
    )


def _model_type(model: Model) -> ModelType:
    spec = model.folder.spec
    if spec.tasks & {"embed", "token_embed", "sparse_embed"}:
        return {"embedding": EmbeddingType(pooling=spec.pooling.replace("lasttoken", "last_token"))}
    names = [model.label(index) for index in range(len(spec.labels) or 1)]
    labels = LabelsType(
        id2label={str(index): name for index, name in enumerate(names)},
        label2id={name: index for index, name in enumerate(names)},
    )
    return {"reranker" if spec.scoring == "pairs" else "classifier": labels}
