"""The models of a server: loading and unloading them while the server runs."""

import logging
from collections.abc import Callable, Collection
from functools import partial

import trio
from attrs import define, field

from trio_pool_serve.config import ModelSource
from trio_pool_serve.engine.deep_probe import DeepProbe
from trio_pool_serve.errors import (
    ConflictError,
    EngineLoadingError,
    ModelLoadError,
    NotFoundError,
    QuotaExceededError,
    UnavailableError,
    forget_frames,
    innermost,
    require,
)
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.serving.model_maker import NO_WINDOWS, ModelMaker
from trio_pool_serve.serving.model_use import ModelUse, idle_models
from trio_pool_serve.serving.named_models import NamedModels
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.start_display import report_phase

logger = logging.getLogger(__name__)

MAX_MODELS = 256
"""Maximum number of models, loaded or not: each has metrics and a line in the list."""

RETRY_S = 5.0
"""Pause after a failed load before the model is loaded again; its requests are refused meanwhile."""


@define(eq=False)
class ServedModels(NamedModels):
    """The models of a service by name. ``run`` loads them and runs their engines.

    A model that is loaded or unloaded while the server runs has its own task, which no request owns: if a client
    leaves, the load that its request has started goes on. A failed load fails the requests that wait for it and affects
    no other model. An engine that dies after its model was loaded ends the service.
    """

    maker: ModelMaker
    owns_engines: bool
    """Whether this is the server's only API process."""
    on_loaded: Callable[[], object]
    """Called once, after the initial models are loaded."""
    are_loaded: trio.Event = field(init=False, factory=trio.Event)
    """An event that is set once the initial models are loaded."""
    _initial: list[ServedModel] = field(init=False)
    """The models to load at start: the first ``--max-loaded-models``."""
    _unloading: set[ServedModel] = field(init=False, factory=set)
    _nursery: trio.Nursery = field(init=False)
    """Open once ``run`` has begun."""

    def __attrs_post_init__(self) -> None:
        for source in self.maker.config.sources:
            self._add(source)
        self._initial = [*self.by_name.values()][: self.maker.config.model_changes.max_loaded_models]

    def _add(self, source: ModelSource, *, is_new: bool = False) -> ServedModel:
        served = ServedModel(source, self.maker.make_engine(source), is_new=is_new)
        self.maker.metrics.add_gauges(served.gauges, model=source.name)
        self.by_name[source.name] = served
        return served

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the initial models, then run the engines of all loaded models until cancelled.

        ``started`` before loading. Raises ``ModelLoadError`` or ``EngineDeadError``, possibly in a group. Cancellation:
        at once; waiting requests fail.
        """
        async with trio.open_nursery() as self._nursery:
            for served in self._initial:
                served.begin_loading()
            task_status.started()
            for served in self.by_name.values():
                # Reports wrong files before anything is loaded, which may take minutes.
                report_phase(f"Reading {served.source.name}")
                try:
                    folder = await self.maker.offload.run("load", partial(self.maker.read_folder, served.source))
                except ModelLoadError as error:
                    raise ModelLoadError.of_model(served.source.name, error) from error
                if served not in self._initial:
                    served.folder = folder
            for served in self._initial:
                # Local engines queue in this order for the one thread that loads.
                await self._nursery.start(self._live, served)
            for served in self._initial:
                await served.settled.wait()
            self.on_loaded()
            for served in self._initial:
                served.is_frozen = True
            self.maker.offload.is_serving = True
            self.are_loaded.set()
            if self.maker.config.model_changes.idle_unload_s:
                await self._unload_idle(self.maker.config.model_changes.idle_unload_s)
            await trio.sleep_forever()

    async def _live(
        self, served: ServedModel, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Load a model, run its engine until its scope is cancelled, and return its memory."""
        try:
            with served.scope:
                if self.are_loaded.is_set():
                    await self.maker.download(served.source)
                for other in self._unloading - {served}:
                    await other.ended.wait()  # or more models than --max-loaded-models would be in memory
                async with trio.open_nursery() as nursery:
                    await nursery.start(served.engine.run)
                    task_status.started()
                    await self._load(served)
        except Exception as error:
            if not self.are_loaded.is_set() and isinstance(cause := _cause_of(error), ModelLoadError):
                raise ModelLoadError.of_model(served.source.name, cause) from cause
            if not self.are_loaded.is_set() or served.state not in ("loading", "unloading"):
                raise
            self._note_error(served, _cause_of(error))
        self.maker.metrics.model_changes["failed_loads" if served.failure else "unloads"].inc()
        await self._free(served)

    async def _load(self, served: ServedModel) -> None:
        maker, offload = self.maker, self.maker.offload
        # Before waiting for the engine, which may convert models for minutes: most errors are found here.
        folder, renderer = await offload.run("load", partial(maker.load_renderer, served.source))
        if folder.spec.assumption and self.owns_engines:
            logger.warning("%s: %s", served.source.name, folder.spec.assumption)
        if served.source.loading.long_text == "chunk" and not folder.spec.embeds_windows:
            logger.warning("%s: %s", served.source.name, NO_WINDOWS)
        if renderer.conversations is not None and renderer.conversations.chat.templates:
            await maker.processes["template"].start_first()
        await maker.announce_to_hosts(served.source, folder)
        await served.engine.wait_ready()
        devices = served.engine.devices
        if devices.is_local:  # an engine process logs this itself
            logger.info("loaded in %.1f s: %s: %s", devices.memory.loading_s, served.source.name, devices.facts)
        of_tasks = await served.check_adapters(folder, offload)
        served.finish_loading(maker.make_model(served, folder, renderer, of_tasks))
        maker.metrics.model_changes["loads"].inc()

    def _note_error(self, served: ServedModel, cause: BaseException) -> None:
        reason = str(cause) if isinstance(cause, ModelLoadError) else f"{type(cause).__name__}: {cause}"
        forget_frames(cause)  # its frames hold the loaded model, and the failed thread may hold the error
        if served.settled.is_set():  # it had been loaded
            logger.error("%s: error while unloading: %s", served.source.name, reason)
            return
        served.failure = reason
        served.retry_at = trio.current_time() + RETRY_S
        logger.error("%s cannot be loaded: %s", served.source.name, served.failure)
        if served.is_new:
            self._remove(served)

    async def _free(self, served: ServedModel) -> None:
        """Return the memory of a model whose engine has ended."""
        maker, name = self.maker, served.source.name
        self._unloading.add(served)
        may_have_images = served.loaded is not None and served.loaded.folder.reads_images
        served.state, served.loaded = "unloading", None
        served.settled.set()
        free = partial(maker.free, served.engine, was_frozen=served.is_frozen)
        if self._has(served):
            served.engine = maker.make_engine(served.source)
            served.probe = DeepProbe(served.engine)
            maker.metrics.add_gauges(served.gauges, model=name)
        if may_have_images:
            maker.media.cache.clear()
        await maker.offload.run("load", free)
        served.state, served.is_frozen = "unloaded", False
        self._unloading.discard(served)
        if name not in self.by_name:
            maker.metrics.forget(name)
        if not served.failure:
            logger.info("unloaded %s", name)
        served.ended.set()

    def _has(self, served: ServedModel) -> bool:
        return self.by_name.get(served.source.name) is served

    # -- uses -------------------------------------------------------------------------------------------

    def use(self, name: str | None = None, *, among: Collection[str] | None = None) -> ModelUse:
        """Begin a use of a model, for ``loaded``. Raises ``NotFoundError``."""
        served, name = self.resolve(name, among=among)
        require(not served.is_leaving, f"The model `{served.source.name}` is being unloaded.", NotFoundError)
        return ModelUse(served, served.adapters.get(name))

    def loaded_nowait(self, served: ServedModel) -> Model | None:
        """Return a model if it is loaded, else ``None``.

        Raises ``EngineLoadingError`` until the initial models are loaded, and for a model that was never loaded.
        """
        self.require_started()
        takes_rows = served.loaded is not None and served.engine.devices.takes_rows
        if served.folder is None or (served.loaded is not None and not takes_rows and served.engine.state == "loading"):
            raise EngineLoadingError("The model is being loaded.")
        return served.loaded

    def require_started(self) -> None:
        """Raise ``EngineLoadingError`` until the initial models are loaded."""
        require(self.are_loaded.is_set(), "The model is being loaded.", EngineLoadingError)

    def folder_of(self, name: str | None = None) -> AnyModelFolder:
        """Return the folder of a model, which may be unloaded. Raises as ``find`` and ``loaded_nowait``."""
        self.require_started()
        if (folder := self.find(name).folder) is None:
            raise EngineLoadingError("The model is being loaded.")
        return folder

    async def loaded(self, use: ModelUse) -> Model:
        """Load the model of a use if necessary, and return it with the adapter of the use, if there is one.

        Raises as ``loaded_nowait`` and ``ModelUse.adapted``, ``UnavailableError`` if it cannot be loaded or no other
        model can make room, and ``NotFoundError`` if it is removed meanwhile. Cancellation: at once; the load goes on.
        """
        served, name = use.served, use.served.source.name
        while (model := self.loaded_nowait(served)) is None:
            require(self._has(served), f"The model `{name}` has been unloaded.", NotFoundError)
            if served.state == "unloading":
                await served.ended.wait()
                continue
            if served.state == "unloaded" and trio.current_time() >= served.retry_at:
                self._begin_loading(served)
            await served.settled.wait()
            if served.failure:  # clients do not get it: it may name files
                raise UnavailableError(
                    f"The model `{name}` cannot be loaded now; the server's log contains the reason."
                )
        return use.adapted(model)

    # -- changes ----------------------------------------------------------------------------------------

    async def add(self, source: ModelSource) -> ServedModel:
        """Load another model, and return it. If that fails, the model is not added.

        Raises ``ConflictError`` if a name is taken, ``QuotaExceededError`` if there are ``MAX_MODELS`` already,
        ``UnavailableError`` if no other model can make room, and ``ModelLoadError``. Cancellation: at once; the load
        goes on.
        """
        self.require_free(source.name, *source.aliases, *source.adapters)
        self._make_room()
        served = self._add(source, is_new=True)
        self._begin_loading(served)
        await served.settled.wait()
        require(not served.failure, served.failure)
        if served.loaded is None:
            raise ConflictError(f"The model `{source.name}` has been unloaded before it was loaded.")
        return served

    def require_free(self, *names: str) -> None:
        """Raise ``ConflictError`` or ``QuotaExceededError`` unless a model or adapter of these names can be added."""
        self.require_started()
        for name in names:
            require(self.named(name) is None, f"A model `{name}` exists already.", ConflictError)
        if len(self.by_name) + len(self.adapters_among(None)) >= MAX_MODELS:
            raise QuotaExceededError(f"The limit of {MAX_MODELS} models is reached; unload some first.")

    async def remove(self, served: ServedModel, *, drains: bool) -> None:
        """Remove a model: unload it, or stop loading it, and return when its memory is free.

        With ``drains``, waits for the requests that use it for up to ``--drain-timeout-s``, after which they fail;
        otherwise raises ``ConflictError`` if there are any. Cancellation: at once; the model is removed all the same.
        """
        self.require_started()
        if not drains:
            users = f"{served.users} requests use the model `{served.source.name}`"
            require(not served.users, f"{users}; ?drain=1 waits until they have ended.", ConflictError)
            self._remove(served)
        elif not served.is_leaving:
            served.is_leaving = True
            self._nursery.start_soon(self._drain, served)
        await served.removed.wait()
        if served.state == "unloading":
            await served.ended.wait()

    async def _drain(self, served: ServedModel) -> None:
        with trio.move_on_after(self.maker.config.time_limits.drain_timeout_s):
            while served.users:
                await served.unused.park()
        if served.users:
            logger.warning("unloading %s with %d requests unfinished", served.source.name, served.users)
        self._remove(served)

    def _remove(self, served: ServedModel) -> None:
        """Free a model's name and unload it; does nothing if it has been removed already."""
        if not self._has(served):
            return  # its load failed while it was being removed; the name may be another model's by now
        del self.by_name[served.source.name]
        if served.state in ("loading", "loaded"):
            self._begin_unloading(served)
        elif served.state == "unloaded":
            self.maker.metrics.forget(served.source.name)
        served.removed.set()

    def _begin_loading(self, served: ServedModel) -> None:
        """Start to load a model. Raises ``UnavailableError`` if no other model can make room."""
        self._make_room()
        served.begin_loading()
        self._nursery.start_soon(self._live, served)

    def _make_room(self) -> None:
        """Unload the model that has been idle for longest if ``--max-loaded-models`` are loaded."""
        most = self.maker.config.model_changes.max_loaded_models
        present = [served for served in self.by_name.values() if served.state in ("loading", "loaded")]
        if most is None or len(present) < most:
            return
        if not (idle := idle_models(present)):
            raise UnavailableError(f"--max-loaded-models is {most}, and all loaded models are in use. Retry later.")
        self._begin_unloading(min(idle, key=lambda served: served.idle_since))

    def _begin_unloading(self, served: ServedModel) -> None:
        """Stop a model's engine. Requests that use it fail; new requests load it again."""
        self._unloading.add(served)
        if served.loaded is not None and served.loaded.results is not None:
            served.loaded.results.clear()
        served.state, served.loaded = "unloading", None
        served.scope.cancel(reason="the model is unloaded")

    async def _unload_idle(self, idle_s: float) -> None:
        """Unload models that have had no request for ``idle_s``, forever."""
        while True:
            now = trio.current_time()
            for served in idle_models(self.by_name.values()):
                if served.idle_since + idle_s <= now:
                    self._begin_unloading(served)
            # A model that becomes idle meanwhile is due later than all of these.
            idle = idle_models(self.by_name.values())
            await trio.sleep_until(min((served.idle_since for served in idle), default=now) + idle_s)

    async def wait_ready(self) -> None:
        """Wait until the initial models are loaded. Raises ``EngineDeadError``. Cancellation: at once."""
        for served in self._initial:
            if served.state == "loaded" or not self.are_loaded.is_set():
                await served.engine.wait_ready()
        await self.are_loaded.wait()

    @property
    def descriptions(self) -> dict[str, str]:
        """How the loaded models are computed, by name; without models on other machines."""
        places = self.maker.places
        remote = {} if places is None or places.supervisor is None else places.supervisor.descriptions
        loaded = {name: served.engine.devices for name, served in self.by_name.items() if served.state == "loaded"}
        return {**remote, **{name: str(each.facts) for name, each in loaded.items() if each.is_local}}

    @property
    def present(self) -> list[ServedModel]:
        """The models whose engines must work for the server to be ready."""
        if not self.are_loaded.is_set():
            return self._initial
        return [served for served in self.by_name.values() if served.state == "loaded"]


def _cause_of(error: Exception) -> BaseException:
    known = error.split(ModelLoadError)[0] if isinstance(error, ExceptionGroup) else error
    return innermost(known or error)
