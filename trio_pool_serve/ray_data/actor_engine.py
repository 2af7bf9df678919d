"""The engine of one actor, for its synchronous code."""

import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypedDict, TypeVar

import attrs

from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TextOptions
from trio_pool_serve.bulk.own_engine import OwnEngine, open_own_engine
from trio_pool_serve.bulk.table_task import TaskOptions
from trio_pool_serve.config.model_config import BackendChoice, Dtype
from trio_pool_serve.config.setting import plain_message
from trio_pool_serve.errors import require_request
from trio_pool_serve.processes.large_imports import allow_torch
from trio_pool_serve.prompts import InputType
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.threads.loop_thread import LoopThread

logger = logging.getLogger(__name__)

R = TypeVar("R")


class EngineOptions(TypedDict, total=False):
    """The options of all classes, with the names and defaults of the bulk commands."""

    prompt_name: str | None
    input_type: InputType | None
    truncate: bool
    revision: str | None
    trust_remote_code: bool
    adapter_base: str | None
    model_dtype: Dtype
    device: str
    backend: BackendChoice
    max_model_len: int | None
    max_batch_tokens: int | None
    replicas: int | None


class WithEngine:
    """A model that is loaded in this process, with an event loop in a thread of its own: the base of all classes.

    The engine ends with the last reference to this object, or with the process. If it fails before, the next call loads
    the model again, so that an actor does not fail all later batches.

    Raises ``ModelLoadError``, ``InvalidRequestError`` if the model cannot compute with these options, ``TypeError`` for
    an unknown option and ``ValueError`` for a wrong value.
    """

    def __init__(self, model: str, options: EngineOptions, **task: Any) -> None:
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {model!r}: pass a local folder or the id of a model on the hub.")
        if unknown := options.keys() - EngineOptions.__annotations__.keys():
            known = ", ".join(EngineOptions.__annotations__)
            raise TypeError(f"Unknown option {', '.join(sorted(unknown))}; accepted: {known}.")
        self._model = model
        self._task = checked(TaskOptions, **task)
        if wrong := [column for column in self._task.columns if not isinstance(column, str)]:
            raise TypeError(f"{wrong[0]!r} is not a name of a column, which is a string.")
        self._text = checked(TextOptions, **_fields_of(TextOptions, options))
        own = checked(OwnModelOptions, **_fields_of(OwnModelOptions, options))
        self._open = partial(_open, model, own, self._task, self._text)
        self._lock = threading.Lock()
        self._loop = self._start()

    def _call(self, use: Callable[[OwnEngine], Awaitable[R]]) -> R:
        """Return the result of ``await use(engine)``; blocks. May be called from several threads.

        Raises the errors of ``use``, and ``EngineDeadError`` if the engine fails meanwhile.
        """
        with self._lock:
            if self._loop.has_ended:
                logger.warning("%s is loaded again, because its engine has ended", self._model)
                self._finalizer.detach()
                self._loop = self._start()
        return self._loop.call(use)

    def close(self) -> None:
        """End the engine and its threads, as the end of the actor does. Blocks for as long as that takes.

        Another call would load the model again.
        """
        self._finalizer()

    def _start(self) -> LoopThread[OwnEngine]:
        loop = LoopThread(self._open, name="ray-data")
        self._finalizer = weakref.finalize(self, loop.close)  # also runs when the process exits
        allow_torch()  # Ray may run other functions of the data set in the same actor
        return loop

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._model} {self._loop!r}>"


def checked(options_class: type[R], **values: Any) -> R:
    """Return options with these values; raise ``ValueError`` with nothing but the reason."""
    try:
        return options_class(**values)
    except ValueError as error:
        raise ValueError(plain_message(error)) from None


def _fields_of(options_class: type[attrs.AttrsInstance], options: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in attrs.fields(options_class)}
    return {name: value for name, value in options.items() if name in names}


@asynccontextmanager
async def _open(model: str, own: OwnModelOptions, task: TaskOptions, text: TextOptions) -> AsyncIterator[OwnEngine]:
    """Open the engine, and compute an example: options with which each row fails are refused at once."""
    async with open_own_engine(model, own, task, text) as engine:
        (result,) = (await engine.compute([InputRow(0, "", 0, task.record.example)])).rows
        require_request(not result.error, result.error)
        yield engine
