"""The interface of heads."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.types import PooledValue

HostArray = npt.NDArray[Any]
"""A head's output on the host: float32, or int32 where that is what the head returned."""


@frozen(eq=False)
class HeadRows:
    """A head's output on the device, and the function that splits it once it is on the host.

    ``tensor`` has floating-point numbers, which are copied as float32, or int32. ``split`` takes it as an array of the
    same shape and returns one value per row; it may run in any thread, and may block for a further copy.
    """

    tensor: Tensor
    split: Callable[[HostArray], list[PooledValue]]


class Head(Protocol):
    """Computes one kind of output for some rows of a batch."""

    @property
    def reads_states(self) -> bool:
        """Whether the head needs the states of a forward pass, and not the token ids alone."""

    def __call__(self, forward: ForwardPass, params: Sequence[Any]) -> HeadRows:
        """Compute the rows of ``forward``; ``params`` has one for each row, of the class that this head serves.

        Enqueues work on the current stream without waiting for it.
        """
