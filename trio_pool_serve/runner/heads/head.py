"""The interface of heads."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.types import PooledValue


@frozen(eq=False)
class HeadRows:
    """A head's output on the device, and the function that splits it once it is on the host.

    ``split`` takes the tensor as an array of the same shape and returns one value per row; it may run in any thread.
    """

    tensor: Tensor
    split: Callable[[npt.NDArray[np.float32]], list[PooledValue]]


class Head(Protocol):
    """Computes one kind of output for some rows of a batch."""

    @property
    def reads_states(self) -> bool:
        """Whether the head needs the states of a forward pass, and not the token ids alone."""

    def __call__(self, forward: ForwardPass, params: Sequence[Any]) -> HeadRows:
        """Compute the rows of ``forward``; ``params`` has one for each row, of the class that this head serves.

        Enqueues work on the current stream without waiting for it.
        """
