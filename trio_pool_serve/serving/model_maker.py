"""Builds the engine, the tokenizer and the renderer of a served model."""

from collections.abc import Mapping
from functools import partial

from attrs import Factory, define, field

from trio_pool_serve.config import Config, ModelSource
from trio_pool_serve.engine.engine import Engine, ModelQueue
from trio_pool_serve.engine.places.server_places import ServerPlaces
from trio_pool_serve.engine.result_cache import ModelResults, ResultCache
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import require
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.models.folder import locate_model, open_model_folder
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of, renderer_of
from trio_pool_serve.models.loading.runner_loader import LocalRunners, RunnerLoader
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.rendering.media.loader import MediaLoader
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Adapter

NO_WINDOWS = "--long-text chunk: this model does not embed texts in windows; long ones would be refused."


@define(eq=False)
class ModelMaker:
    """Builds the engine and the ``Model`` of each served model, from the resources that all models share."""

    config: Config
    offload: Offload
    metrics: Metrics
    load_runner: RunnerLoader
    processes: dict[str, WorkerProcesses]
    """Worker processes for chat templates."""
    media: MediaLoader
    memory: MemoryBudget
    results: ResultCache
    places: ServerPlaces | None
    """``None`` if the models compute in this process."""
    _runners: LocalRunners = field(
        init=False, default=Factory(lambda self: LocalRunners(self.config, self.offload), takes_self=True)
    )

    def make_engine(self, source: ModelSource) -> Engine:
        """Return the engine of a model. Engines in other processes must be made in the order of the settings."""
        metrics = self.metrics.of_engine(source.name)
        if self.places is not None:
            return self.places.make_engine(source.name, metrics)
        load = partial(self._runners.load, source, self.load_runner)
        scheduling = self.config.scheduling
        queue = ModelQueue(scheduling.max_queue_s, metrics)
        return Engine(queue, Worker(queue.dispatcher, scheduling, load=load, offload=self.offload, metrics=metrics))

    async def announce_to_hosts(self, source: ModelSource, folder: AnyModelFolder) -> None:
        """Tell the links to engines on other machines which files a model has. Cancellation: at once."""
        if self.places is not None and self.places.hosts is not None:
            digest = await self.offload.run("load", partial(digest_of, folder.path, source.loading))
            self.places.hosts.serve(source.name, digest)

    def free(self, ended: Engine, *, was_frozen: bool) -> None:
        """Free the memory of a model whose engine has ended. Blocks for at least 0.1 s.

        ``was_frozen``: whether its objects are exempt from garbage collection.
        """
        ended.devices.free()
        self._runners.free(was_frozen=was_frozen)

    async def download(self, source: ModelSource) -> None:
        """Download a model from the hub, so that the thread that loads models does not wait for the network.

        Raises ``ModelLoadError``. Cancellation: at once; the thread goes on.
        """
        await self.offload.run(
            "download", partial(locate_model, source.location, source.loading), abandon_on_cancel=True
        )

    def read_folder(self, source: ModelSource) -> AnyModelFolder:
        """Read a model's small files. Blocks. Raises ``ModelLoadError``."""
        folder = open_model_folder(source.location, source.loading)
        if self.config.sources == (source,) and source.loading.long_text == "chunk":
            require(folder.spec.embeds_windows, NO_WINDOWS)
        return folder

    def load_renderer(self, source: ModelSource) -> tuple[AnyModelFolder, Renderer]:
        """Read a model's folder and build its renderer, without support for token embeddings. Blocks.

        Raises ``ModelLoadError``.
        """
        config, folder = self.config, self.read_folder(source)
        tokenizer = load_tokenizer(
            folder,
            trust_remote_code=source.loading.trust_remote_code,
            cache=ModelCache.of(source.loading.cache_dir),
        )
        return folder, renderer_of(
            folder,
            tokenizer,
            self.offload,
            workers=config.threads.renderer_num_workers,
            templates=ChatTemplates(self.processes, self.offload),
            trusts_request_templates=config.input.trust_request_chat_template,
            media=self.media,
            image_format=folder.image_format(),
            memory=self.memory,
        )

    def make_model(
        self, served: ServedModel, folder: AnyModelFolder, renderer: Renderer, task_adapters: Mapping[str, Adapter]
    ) -> Model:
        """Return the ``Model`` for requests. Its engine must be ready."""
        renderer.embeds_format = embeds_format_of(
            folder, served.engine.facts.embeds_width, enabled=self.config.input.enable_prompt_embeds
        )
        return Model(
            served.source.name,
            folder,
            renderer,
            served.engine,
            served.engine.facts.dimensions,
            long_text=served.source.loading.long_text,
            results=ModelResults(self.results) if self.results.max_bytes else None,
            task_adapters=task_adapters,
        )
