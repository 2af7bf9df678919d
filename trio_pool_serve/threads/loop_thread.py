"""A Trio event loop in a thread, for callers without one."""

import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import outcome
import trio
from attrs import define, field

from trio_pool_serve.threads.dedicated_threads import start_thread

T = TypeVar("T")
R = TypeVar("R")

CLOSE_TIMEOUT_S = 10.0
"""A loop ends quickly: it does not wait for calls."""


@define(eq=False)
class _Call(Generic[T]):
    """One caller's call of an async function in the loop."""

    use: Callable[[T], Awaitable[Any]]
    result: "Future[Any]" = field(init=False, factory=Future)
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    async def run(self, opened: T) -> None:
        with self.scope:
            try:
                value = await self.use(opened)
            except Exception as error:
                self.result.set_exception(error)
            else:
                self.result.set_result(value)


class LoopThread(Generic[T]):
    """A Trio event loop in a daemon thread, within the context manager that ``open_context()`` returns.

    The constructor returns once the context is entered, or raises what entering raises. A daemon thread does not keep
    the process from exiting if it is not closed. All methods block, and may be called from any thread but the loop's.
    """

    def __init__(self, open_context: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> None:
        self._open_context = open_context
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: set[_Call[T]] = set()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._scope = trio.CancelScope()
        self._started: Future[trio.lowlevel.TrioToken] = Future()
        self._send, self._receive = trio.open_memory_channel[_Call[T]](math.inf)  # at most one call for each thread
        ready: Future[None] = Future()
        jobs = start_thread(name)
        jobs.put(partial(self._run, ready))
        jobs.put(None)
        try:
            ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended, because it was closed or its context failed."""
        return self._ended.is_set()

    def call(self, use: Callable[[T], Awaitable[R]]) -> R:
        """Return what ``await use(opened)`` returns, run as a task of the loop; raise what it raises.

        Raises the loop's error if the loop ends first, ``trio.RunFinishedError`` if it was closed. Interrupting the
        caller, by ``KeyboardInterrupt`` for example, cancels the task.
        """
        if os.getpid() != self._process:
            raise RuntimeError("A forked process cannot use its parent's event loop: open one in this process.")
        call = _Call(use)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._calls.add(call)
        try:
            self._soon(partial(self._send.send_nowait, call))
            result: R = call.result.result()
        except BaseException:
            self._soon(call.scope.cancel)
            raise
        finally:
            with self._lock:
                self._calls.discard(call)
        return result

    def close(self) -> None:
        """Cancel all calls, leave the context, and wait up to ``CLOSE_TIMEOUT_S`` until the loop has ended."""
        self._soon(self._scope.cancel)
        self._ended.wait(CLOSE_TIMEOUT_S)

    def _soon(self, change: Callable[[], object]) -> None:
        with suppress(trio.RunFinishedError):
            self._started.result().run_sync_soon(change)

    def _run(self, ready: "Future[None]") -> None:
        result = outcome.capture(trio.run, self._serve, ready)
        error = result.error if isinstance(result, outcome.Error) else trio.RunFinishedError("The loop was closed.")
        with self._lock:
            self._error = error
            waiting: list[Future[Any]] = [self._started, ready, *(call.result for call in self._calls)]
        self._ended.set()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    async def _serve(self, ready: "Future[None]") -> None:
        self._started.set_result(trio.lowlevel.current_trio_token())
        with self._scope:
            async with self._open_context() as opened, trio.open_nursery() as nursery:
                ready.set_result(None)
                async for call in self._receive:
                    nursery.start_soon(call.run, opened)

    def __repr__(self) -> str:
        return f"<LoopThread {'ended' if self.has_ended else f'{len(self._calls)} calls'}>"
