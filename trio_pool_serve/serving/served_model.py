"""One model of a server: its source, its state, its engine and the requests that use it."""

import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import trio
from attrs import Factory, asdict, define, evolve, field

from trio_pool_serve.config import ModelSource
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.deep_probe import DeepProbe
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.engine_statistics import ENGINE_STATES
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Adapter, RunnerFacts

ModelState: TypeAlias = Literal["loading", "loaded", "draining", "unloading", "unloaded"]
"""draining: to be unloaded once the requests that use it have ended. unloading: its memory is being freed."""


@define(eq=False)
class ServedModel:
    """One model of a service: its engine, and its ``Model`` while it is loaded."""

    source: ModelSource
    engine: Engine
    loaded: Model | None = None
    folder: AnyModelFolder | None = None
    """The model's files; known from the first load on, or read at start if it is not loaded then."""
    facts: RunnerFacts = field(default=RunnerFacts(max_batch_tokens=0), kw_only=True)
    """The facts of the engine, with ``Model.computed_by``, as of the last load."""
    adapters: dict[str, ServedAdapter] = field(
        init=False,
        default=Factory(
            lambda self: {name: ServedAdapter(name, location) for name, location in self.source.adapters.items()},
            takes_self=True,
        ),
    )
    """Adapters by name. At a model's first load, the adapters of the settings are checked."""
    probe: DeepProbe = field(init=False, default=Factory(lambda self: DeepProbe(self.engine), takes_self=True))
    created: float = field(init=False, factory=time.time)
    """Seconds since the epoch."""
    last_used: float | None = field(init=False, default=None)
    """Seconds since the epoch."""
    state: ModelState = field(init=False, default="unloaded")
    is_leaving: bool = field(init=False, default=False)
    """Whether it is being removed: it takes no more requests, and goes once running ones have ended."""
    is_new: bool = field(default=False, kw_only=True)
    """Whether it was added at run time and has not been loaded yet: if its load fails, it is removed."""
    is_frozen: bool = field(init=False, default=False)
    """Whether its objects are exempt from garbage collection."""
    failure: str = field(init=False, default="")
    """Why the last load failed; empty if it did not."""
    retry_at: float = field(init=False, default=0.0)
    """Earliest time of another load after a failure, by trio's clock."""
    users: int = field(init=False, default=0)
    """Number of requests that compute with it or wait for it to be loaded."""
    idle_since: float = field(init=False, default=0.0)
    """When ``users`` became 0, by trio's clock."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    """Cancelled to unload the model."""
    settled: trio.Event = field(init=False, factory=trio.Event)
    """An event that is set once a load has succeeded or failed; a new one for each load."""
    ended: trio.Event = field(init=False, factory=trio.Event)
    """An event that is set once the model is unloaded and its memory is free; a new one for each load."""
    removed: trio.Event = field(init=False, factory=trio.Event)
    """An event that is set once the model's name is free."""
    unused: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    """Unparked once no request uses it."""

    async def check_adapters(self, folder: AnyModelFolder, offload: Offload) -> Mapping[str, Adapter]:
        """Check adapters of the settings; return the adapters of the model's own tasks. The engine must be ready.

        One that a request is adding is checked by that request, and does not fail the model's load. Raises
        ``ModelLoadError``. Cancellation: as ``ServedAdapter.check``.
        """
        of_tasks = {task: ServedAdapter(task, str(path)) for task, path in folder.task_adapters.items()}
        of_settings = [self.adapters[name] for name in self.source.adapters if name in self.adapters]
        for adapter in (*of_tasks.values(), *of_settings):
            if adapter.adapter is None:
                try:
                    await adapter.check(self.engine, offload)
                except ModelLoadError as error:
                    raise ModelLoadError(f"the adapter {adapter.name}: {error}") from error
        return {task: served.adapter for task, served in of_tasks.items() if served.adapter is not None}

    def begin_loading(self) -> None:
        """Begin to load it: requests wait until it has settled."""
        self.state, self.failure = "loading", ""
        self.scope, self.settled, self.ended = trio.CancelScope(), trio.Event(), trio.Event()

    def finish_loading(self, model: Model) -> None:
        """Let requests use ``model``, which is loaded."""
        self.loaded, self.folder = model, model.folder
        self.facts = evolve(model.engine.facts, computed_by=model.computed_by)
        self.state, self.is_new = "loaded", False
        self.idle_since = trio.current_time()
        self.settled.set()

    @property
    def dimensions(self) -> int:
        """The length of its vectors; 0 if it has none, or is not loaded."""
        return 0 if self.loaded is None else self.facts.dimensions

    @property
    def shown_state(self) -> ModelState:
        """The state as shown to clients."""
        return "draining" if self.is_leaving and self.state in ("loading", "loaded") else self.state

    @property
    def reported_load(self) -> dict[str, Any]:
        """The model's part of ``/load``."""
        load = asdict(self.engine.statistics())
        return {**load, "state": "unloaded"} if self.state in ("unloading", "unloaded") else load

    def gauges(self) -> Gauges:
        """Return the model's metrics, without the metrics of its engine."""
        state = "unloaded" if self.state in ("unloading", "unloaded") else self.engine.state
        return {"model": {known: float(known == state) for known in (*ENGINE_STATES, "unloaded")}}

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise as ``Engine.admit`` would now. A model that is not loaded at run time refuses nothing."""
        is_of_start = self.folder is None and not self.is_new
        if self.loaded is not None or is_of_start:
            self.engine.refuse_late(work)
