"""The models of the server: listed, described as other servers describe theirs, loaded and unloaded at run time."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec

import trio_pool_serve
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, name_in_path
from trio_pool_serve.api.routes.adapters import (
    ACCEPTED_NAMES,
    MAX_NAME_CHARACTERS,
    Location,
    Name,
    NewAdapter,
    adapter_object,
    are_accepted,
    body_of,
    decoded,
    load_adapter,
)
from trio_pool_serve.config import ANY_NAME, ModelConfig, ModelSource
from trio_pool_serve.config.model_sources import source_of_table
from trio_pool_serve.errors import (
    InvalidRequestError,
    ModelLoadError,
    NotFoundError,
    require_request,
)
from trio_pool_serve.models.files.chat_settings import JINJA
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelSpec
from trio_pool_serve.service import Service
from trio_pool_serve.serving.adapter_changes import remove_adapter
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PoolingTask

MODELS_PATH, MODEL_PATH, INFO_PATH = "/v1/models", "/v1/models/{name}", "/info"

COMMIT = re.compile(r"[0-9a-f]{40}")

MAX_CONCURRENT_REQUESTS = 512
"""The default of text-embeddings-inference."""


TASK_PREFERENCE: tuple[PoolingTask, ...] = (
    "embed",
    "score",
    "classify",
    "token_embed",
    "sparse_embed",
    "token_classify",
)
"""Tasks by preference: the first that a model can do is its ``task``, unless ``--task`` names another."""


def tasks_of(folder: AnyModelFolder) -> list[PoolingTask]:
    """Return the tasks of a model, the preferred one first."""
    return [task for task in TASK_PREFERENCE if task in folder.spec.tasks]


def main_task_of(folder: AnyModelFolder) -> PoolingTask:
    """Return the ``task`` of a model's entry: the task that it is served for."""
    return folder.task or tasks_of(folder)[0]


def model_object(service: Service, served: ServedModel, name: str) -> dict[str, object]:
    """Return the entry of a model by one of its names, as OpenAI's and Cohere's clients read it.

    ``tasks`` are the tasks of this server, ``name`` is Cohere's name for the id. Clients that discover models read
    ``model_type``, ``max_tokens`` and ``context_length``, as Xinference has them. ``created`` and ``last_used`` are in
    seconds since the epoch. Fields that are unknown until a model is loaded for the first time are left out until then,
    as is memory that is not measured: see ``ModelMemory`` and ``ComputedBy``. ``cosine_with_float32`` is only there for
    a quantised model: the mean over some texts.
    """
    folder, cosine, memory = served.folder, served.facts.cosine_with_float32, served.engine.devices.memory
    computed_by = served.facts.computed_by if served.loaded is None else served.loaded.computed_by
    tasks, length = ([], None) if folder is None else (tasks_of(folder), folder.max_model_len)
    known = {
        "max_model_len": length,
        "max_tokens": length,
        "context_length": length,
        "model_type": None if folder is None else _kind_of(folder.spec).replace("reranker", "rerank"),
        "task": None if folder is None else main_task_of(folder),
        "tasks": tasks or None,
        "sparse_indices": folder.spec.sparse_indices if folder and "sparse_embed" in tasks else None,
        "last_used": None if served.last_used is None else int(served.last_used),
        "memory_bytes": memory.resident_bytes or None,
        "device_memory_bytes": memory.device_bytes or None,
        **{field: value or None for field, value in computed_by._asdict().items()},
        "cosine_with_float32": None if cosine is None else round(cosine, 4),
    }
    return {
        "id": name,
        "created": int(max(service.started, served.created)),
        "root": served.source.shown_location,
        "name": name,
        "owned_by": "trio_pool_serve",
        "object": "model",
        "state": served.shown_state,
        **{field: value for field, value in known.items() if value is not None},
    }


def card_of(service: Service, served: ServedModel, name: str) -> dict[str, object]:
    """Return the entry of a model or of one of its adapters."""
    card, adapter = model_object(service, served, name), served.adapters.get(name)
    return card if adapter is None else adapter_object(served, adapter, card)


def names_among(service: Service, names: Collection[str] | None) -> list[tuple[ServedModel, str]]:
    """Return the names of models, aliases included, then names of adapters, among the names that a key may use."""
    own = [(served, name) for served in service.models.among(names) for name in served.source.names]
    return own + [(served, adapter.name) for served, adapter in service.models.adapters_among(names)]


def model_of(service: Service, request: HttpRequest) -> tuple[ServedModel, str]:
    """Return the model that a request's path names, or an adapter of, and that name.

    Raises ``NotFoundError`` and ``EngineLoadingError``.
    """
    service.models.require_started()
    name = name_in_path(request.route, request.path) or ""
    served = service.models.named(name) or service.models.named(name := name.rstrip("/"))
    if served is None or (served, name) not in names_among(service, request.models):
        raise NotFoundError(f"The model `{name}` does not exist.", model=name)
    return served, name


def _kind_of(spec: ModelSpec) -> Literal["embedding", "reranker", "classifier"]:
    if spec.tasks & {"embed", "token_embed", "sparse_embed"}:
        return "embedding"
    return "reranker" if spec.scoring == "pairs" else "classifier"


def _model_type(model: Model) -> dict[str, dict[str, object]]:
    """Return one entry: ``embedding`` with the pooling, or ``reranker`` or ``classifier`` with the labels' names."""
    spec = model.folder.spec
    if (kind := _kind_of(spec)) == "embedding":
        return {"embedding": {"pooling": spec.pooling.replace("lasttoken", "last_token")}}
    names = {str(index): model.label(index) for index in range(len(spec.labels) or 1)}
    labels: dict[str, object] = {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
    return {kind: labels}


def model_routes(service: Service) -> Routes:
    """Return the routes that describe the models of a service."""

    async def models(request: HttpRequest) -> HttpResponse:
        service.models.require_started()
        cards = [card_of(service, served, name) for served, name in names_among(service, request.models)]
        # Cohere's clients read ``models``.
        return HttpResponse.json({"data": cards, "models": cards, "object": "list"})

    async def model(request: HttpRequest) -> HttpResponse:
        return HttpResponse.json(card_of(service, *model_of(service, request)))

    async def info(request: HttpRequest) -> HttpResponse:
        """Respond with the facts that clients of text-embeddings-inference request before they send any work.

        ``model_dtype`` is the setting. The last three fields are about builds and limits that this server does not
        have. Cancellation: at once.
        """
        with service.models.use(among=request.models) as use:
            model, source = await service.models.loaded(use), use.served.source
        config, commit = service.config, model.folder.path.name
        return HttpResponse.json(
            {
                "model_id": source.shown_location,
                "model_sha": commit if COMMIT.fullmatch(commit) else None,
                "model_dtype": model.computed_by.dtype or source.loading.dtype,
                "served_model_name": model.name,
                "model_type": _model_type(model),
                # Requests are limited by time and memory instead; clients read a number here.
                "max_concurrent_requests": MAX_CONCURRENT_REQUESTS,
                "max_input_length": model.renderer.max_model_len,
                "max_batch_tokens": model.engine.facts.max_batch_tokens,
                "max_client_batch_size": config.network.max_inputs_per_request,
                "auto_truncate": model.long_text != "refuse",
                "tokenization_workers": config.threads.renderer_num_workers,
                "version": trio_pool_serve.__version__,
                "max_batch_requests": None,
                "sha": None,
                "docker_label": None,
            }
        )

    async def tokenizer_info(request: HttpRequest) -> HttpResponse:
        """Respond as vLLM with the tokenizer's settings and the chat template. Cancellation: at once."""
        with service.models.use(among=request.models) as use:
            model = await service.models.loaded(use)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **model.folder.tokenizer_config}
        conversations = model.renderer.conversations
        template = None if conversations is None else conversations.chat.templates.get("default")
        return HttpResponse.json(settings if template is None else {**settings, "chat_template": template})

    return {
        ("GET", MODELS_PATH): models,
        ("GET", "/models"): models,
        ("GET", MODEL_PATH): model,
        ("GET", INFO_PATH): info,
        ("GET", "/tokenizer_info"): tokenizer_info,
    }


MODEL_CHANGES = frozenset({("POST", MODELS_PATH), ("DELETE", MODEL_PATH)})
"""The routes that change models, which only API keys with ``admin`` may use."""

NAMES = frozenset({"model", "name", "aliases"})

MODEL_BODY = '{"model": "PATH OR HUB ID"}'
ADAPTER_BODY = '{"model": "PATH OR HUB ID", "name": "NAME", "parent": "MODEL"}'


class LoadRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /v1/models``: a local folder or a hub id, and the model's names in the API.

    Further fields are the model's own settings, as in a table of the TOML file.
    """

    model: Location
    name: Name | None = None
    aliases: Annotated[list[Name], msgspec.Meta(max_length=16)] = []

    def source(self, settings: Mapping[str, object], shared: ModelConfig) -> ModelSource:
        """Return the model to load, with ``settings`` on top of ``shared`` ones. Raises ``InvalidRequestError``."""
        name = self.name or self.model
        names = [name, *self.aliases]
        template = settings.get("chat_template")
        refusals = (
            (
                len(name) > MAX_NAME_CHARACTERS,
                "name",
                f"A model of more than {MAX_NAME_CHARACTERS} characters requires a shorter `name`.",
            ),
            (name == ANY_NAME, "name", "`*` stands for all other names: it can be one of `aliases` only."),
            (len(set(names)) < len(names), "aliases", "Two of the model's names are the same."),
            (not are_accepted(self.model, *names), "name", ACCEPTED_NAMES),
            (
                "adapter" in settings,
                "adapter",
                "Adapters are loaded one by one, once the model is there: POST /v1/models with `parent`.",
            ),
            (
                "trust_remote_code" in settings,
                "trust_remote_code",
                "Only the server's own settings can trust a model's code, no request: --trust-remote-code.",
            ),
            (
                isinstance(template, str) and not JINJA.search(template),
                "chat_template",
                "In a request, `chat_template` is the template itself; it has no {{, {% or {#.",
            ),
        )
        for is_wrong, param, message in refusals:
            require_request(not is_wrong, message, param=param)
        try:
            return source_of_table(name, {**settings, "model": self.model, "aliases": self.aliases}, shared)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error


class UnloadQuery(msgspec.Struct, frozen=True):
    """The query of ``DELETE /v1/models/{name}``."""

    drain: bool = False


def model_change_routes(service: Service) -> Routes:
    """Return the routes that load and unload models of a service."""

    async def load(request: HttpRequest) -> HttpResponse:
        """Load a model, or an adapter of the model named ``parent``, and describe it once it is loaded.

        Raises as ``ServedModels.add`` and ``load_adapter``, and ``InvalidRequestError`` with the reason if the model
        cannot be loaded. Cancellation: at once; a model that has begun to be loaded is loaded all the same.
        """
        service.require_changes()
        body = await body_of(service, request)
        fields = decoded(body, dict[str, Any], MODEL_BODY)
        if "parent" in fields:
            served, adapter = await load_adapter(service, request, decoded(body, NewAdapter, ADAPTER_BODY))
            return HttpResponse.json(card_of(service, served, adapter.name))
        settings = {key.replace("-", "_"): value for key, value in fields.items() if key not in NAMES}
        source = decoded(body, LoadRequest, MODEL_BODY).source(settings, service.config.loading)
        request.require_name(*source.names)
        try:
            served = await service.models.add(source)
        except ModelLoadError as error:
            raise InvalidRequestError(f"The model cannot be loaded: {error}", param="model") from error
        return HttpResponse.json(model_object(service, served, source.name))

    async def unload(request: HttpRequest) -> HttpResponse:
        """Unload a model, and respond when its memory is free.

        Raises as ``ServedModels.remove``, and ``NotFoundError``. Cancellation: at once; the model is unloaded all the
        same.
        """
        service.require_changes()
        drains = request.query(UnloadQuery).drain
        served, name = model_of(service, request)
        if name in served.adapters:
            remove_adapter(served, name)
        else:
            await service.models.remove(served, drains=drains)
            name = served.source.name
        return HttpResponse.json({"id": name, "deleted": True, "object": "model"})

    return {("POST", MODELS_PATH): load, ("DELETE", MODEL_PATH): unload}
