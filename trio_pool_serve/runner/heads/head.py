"""What every head takes and gives."""

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
    """A head's rows on the device, and how to take them apart once they are on the host.

    ``split`` gets the tensor as an array of the same shape; it may run in any thread, and gives one value
    per row.
    """

    tensor: Tensor
    split: Callable[[npt.NDArray[np.float32]], list[PooledValue]]


class Head(Protocol):
    """Makes one kind of output for some rows of a batch."""

    @property
    def reads_states(self) -> bool:
        """Whether the head needs the model's forward pass, and not the token ids alone."""

    def __call__(self, forward: ForwardPass, params: Sequence[Any]) -> HeadRows:
        """Compute the rows of ``forward``; ``params`` has what each wants, of the kind this head is for.

        Enqueues work on the current stream and waits for none of it.
        """
