"""A call of the app: in a context of its own, and without any other task for as long as it does not wait."""

from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any

import trio


@coroutine
def call_in_context(
    call: Coroutine[Any, Any, Any], context: Context, before_waiting: Callable[[], object]
) -> Generator[Any, Any, None]:
    """Run ``call`` in a context; ``before_waiting()`` is called when it waits for the first time, if it does.

    A request that is answered without waiting, such as one that is refused, costs no second task: who calls this
    starts the task that notices a disconnect in ``before_waiting``. Cancellation: as ``call``.
    """
    try:
        waits_for = context.run(call.send, None)
    except StopIteration:
        return
    before_waiting()
    trio.lowlevel.current_task().context = context  # for the steps that trio makes from now on
    while True:
        try:
            try:
                outcome = yield waits_for
            except BaseException as error:
                waits_for = call.throw(error)  # raises it, or what ``call`` makes of it
            else:
                waits_for = call.send(outcome)
        except StopIteration:
            return
