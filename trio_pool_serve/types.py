"""The few types that cross floors.

They follow a request on its way: ``Prompt`` (as asked) → ``RenderedPrompt`` (token ids) →
``PoolingRequest`` (one row for the engine) → ``Batch`` (what one forward pass computes) →
``PooledBatch`` (a handle on its result) → ``PoolingOutput`` (one row of it). Each stage takes the type
of the stage before it and nothing else, so no stage can run in another's place.
"""

from collections.abc import Generator
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Shape (tokens,)."""

Vectors: TypeAlias = npt.NDArray[np.float32]
"""Shape (rows, dimensions) for a batch, (dimensions,) for a row."""

TruncationSide: TypeAlias = Literal["left", "right"]


@frozen
class TextPrompt:
    """A text still to be tokenised."""

    text: str

    @property
    def estimated_tokens(self) -> int:
        """A cheap guess for admission, at the four characters a token that English text averages."""
        return len(self.text) // 4 + 1


@frozen(eq=False)
class TokensPrompt:
    """Token ids the client made itself: taken as they are, no special token is added.

    int64, because a client may send numbers that are no token ids at all.
    """

    token_ids: npt.NDArray[np.int64]

    @property
    def estimated_tokens(self) -> int:
        """The exact length."""
        return len(self.token_ids)


Prompt: TypeAlias = TextPrompt | TokensPrompt


@frozen
class RenderingParams:
    """How prompts become token ids.

    ``truncate_to`` is the most tokens kept, special tokens included; ``None`` refuses longer inputs.
    ``instruction`` is put in front of every text.
    """

    truncate_to: int | None = None
    truncation_side: TruncationSide = "right"
    add_special_tokens: bool = True
    instruction: str = ""


@frozen(eq=False)
class RenderedPrompt:
    """What the model reads.

    ``instruction_tokens`` counts the leading tokens that belong to the instruction, for models whose
    pooling leaves them out.
    """

    token_ids: TokenIds
    instruction_tokens: int = 0


@frozen
class PoolingParams:
    """What is wanted from the pooler for one row.

    ``dimensions`` keeps the first components only (matryoshka); ``normalize`` scales the row to unit
    length, ``None`` leaves that to the model's own modules.
    """

    dimensions: int | None = None
    normalize: bool | None = None


@frozen(eq=False)
class PoolingRequest:
    """One row of work: the unit that the engine queues, batches and answers.

    A smaller ``priority`` is served first.
    """

    prompt: RenderedPrompt
    params: PoolingParams = PoolingParams()
    priority: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the model reads for this row."""
        return len(self.prompt.token_ids)


@frozen(eq=False)
class Batch:
    """The rows of one forward pass."""

    requests: tuple[PoolingRequest, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all rows together, without padding."""
        return sum(request.tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(request.tokens for request in self.requests)

    @property
    def padded_tokens(self) -> int:
        """Tokens computed once every row is padded to the longest."""
        return len(self.requests) * self.longest


class PooledBatch(Protocol):
    """The handle on a launched batch: ``await handle`` gives its rows, in the batch's order.

    Cancellation: waiting can be abandoned at any time; what the device is doing goes on, and its
    buffers live until it is done.
    """

    def __await__(self) -> Generator[Any, Any, list[Vectors]]:
        """Wait for the rows to be on the host: one float32 array of shape (dimensions,) each."""


class Runner(Protocol):
    """Computes batches. Used from one thread at a time."""

    def launch(self, batch: Batch) -> PooledBatch:
        """Start the forward pass and return at once where the device is asynchronous.

        Raises ``RunnerDeadError`` when no later batch can succeed; any other exception condemns this
        batch alone.
        """

    def describe(self) -> str:
        """One line for people: what is loaded, and how it computes."""

    @property
    def dimensions(self) -> int:
        """Length of the vectors when nothing is cut off."""

    @property
    def default_batch_tokens(self) -> int:
        """Padded tokens per batch that suit this device when nobody asked for a number."""


@frozen(eq=False)
class PoolingOutput:
    """One row of a finished batch, with the times (seconds) that its batch took."""

    vector: Vectors
    queue_s: float
    forward_s: float
    copy_s: float
