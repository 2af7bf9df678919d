"""The few types that cross floors.

They follow a request on its way: ``Prompt`` (as asked: ``prompts.py``) → ``RenderedPrompt`` (token ids) →
``PoolingRequest`` (one row for the engine) → ``Batch`` (what one forward pass computes) →
``PooledBatch`` (a handle on its result) → ``PoolingOutput`` (one row of it). Each stage takes the type
of the stage before it and nothing else, so no stage can run in another's place.
"""

from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Shape (tokens,)."""

Vectors: TypeAlias = npt.NDArray[np.float32]
"""Shape (rows, dimensions) for a batch, (dimensions,) for a row, (tokens, dimensions) for a row's tokens."""

PoolingTask: TypeAlias = Literal["embed", "token_embed", "sparse_embed", "classify", "token_classify", "score"]
"""What a model can be asked for."""


# -- as the model reads it -------------------------------------------------------------------------------


@frozen(eq=False)
class ImageFeatures:
    """What an image processor made of one image, or of several of the same input, in order.

    ``arrays`` are keyword arguments of the model's forward pass, for one row: ``pixel_values`` float32, of the shape
    that the model wants, and whatever it needs beside them. ``tokens`` is how many positions of the model's sequence
    each image takes.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@frozen(eq=False)
class RenderedPrompt:
    """What the model reads.

    ``instruction_tokens`` counts the leading tokens that belong to the instruction, for models whose
    pooling leaves them out. ``type_ids`` are the segments of a pair, ``None`` where all are 0. Of the tokens
    only the first ``attended`` are attended to, ``None`` for all: the rest are a query's expansion.
    ``kept`` (bool, one per token) chooses the tokens whose vectors leave the model, ``None`` for all.

    ``images`` are read beside the tokens, or by themselves: then the ids are zeros, one for each position that they
    take. ``embeds`` (float32, float16, or uint16 that hold bfloat16; shape (tokens, hidden)) are read in place of the
    ids, which are zeros as well.
    """

    token_ids: TokenIds
    instruction_tokens: int = 0
    type_ids: TokenIds | None = None
    attended: int | None = None
    kept: npt.NDArray[np.bool_] | None = None
    images: ImageFeatures | None = None
    embeds: npt.NDArray[np.float32 | np.float16 | np.uint16] | None = None


# -- what is wanted of the model -------------------------------------------------------------------------


class PoolingParams:
    """What is wanted of one forward pass over a prompt: the base of one frozen attrs class per head.

    A subclass may be defined anywhere, in the module of its head for one. An engine in another process is sent its
    name and its fields, whose types are those that msgspec decodes and ``HeldQuery``. The engine finds it by that name
    if the module that defines it has been imported there, which loading the head has done.
    """

    __slots__ = ()
    by_name: ClassVar[dict[str, type["PoolingParams"]]] = {}
    """All subclasses, by ``wire_name``."""
    wire_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # Called twice for a class with slots, which attrs makes anew: the later one is the one that is used.
        cls.wire_name = f"{cls.__module__}:{cls.__qualname__}"
        PoolingParams.by_name[cls.wire_name] = cls


@frozen
class Embed(PoolingParams):
    """One vector: float32, shape (dimensions,).

    ``dimensions`` keeps the first components only (matryoshka); ``normalize`` scales the row to unit
    length, ``None`` leaves that to the model's own modules.
    """

    dimensions: int | None = None
    normalize: bool | None = None


@frozen
class TokenEmbed(PoolingParams):
    """One vector for each kept token: float32, shape (tokens, dimensions); the fields are those of ``Embed``."""

    dimensions: int | None = None
    normalize: bool | None = None


@frozen
class SparseEmbed(PoolingParams):
    """Weights over the vocabulary, by a forward pass: a ``SparseVector``."""


@frozen
class SparseLookup(PoolingParams):
    """Weights of the text's own tokens, looked up without a forward pass: a ``SparseVector``."""


Activation: TypeAlias = Literal["probabilities", "score", "raw"]
"""What becomes of a classifier's logits. probabilities: as the model was trained, softmax or sigmoid.
score: as a cross-encoder's config says, by default a sigmoid. raw: nothing."""


@frozen
class Classify(PoolingParams):
    """One number per label: float32, shape (labels,)."""

    activation: Activation = "probabilities"


@frozen
class TokenClassify(PoolingParams):
    """One number per label for each kept token: float32, shape (tokens, labels)."""

    activation: Activation = "probabilities"


class QueryScope(Protocol):
    """Queries' token vectors that stay on the device for as long as one request lives."""

    def close(self) -> None:
        """Free what is held, and whatever is yet to come; again does nothing."""


class HeldQuery:
    """The name of one query's vectors on the device. Made for one request, and equal to itself alone.

    Not an attrs class, whose fields msgspec would send: what it stands for differs from process to process.
    """

    __slots__ = ("scope",)

    def __init__(self, scope: QueryScope) -> None:
        self.scope = scope


@frozen
class QueryParams(PoolingParams):
    """Params about one query's vectors: the row is computed where these are held."""

    query: HeldQuery


@frozen
class HoldQuery(QueryParams):
    """Stage one of late interaction: keep the token vectors on the device; float32, shape (1,), how many."""


@frozen
class MaxSim(QueryParams):
    """Stage two: for each of the query's vectors its greatest dot product with this row's, summed.

    float32, shape (1,). Khattab and Zaharia, https://arxiv.org/abs/2004.12832, eq. 3.
    """


@frozen(eq=False)
class SparseVector:
    """Weights above zero: int32 vocabulary ``indices``, ascending, and float32 ``values``, both shape (n,)."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


PooledValue: TypeAlias = Vectors | SparseVector
"""What one of the ``PoolingParams`` gives for one row."""


@frozen(eq=False)
class PoolingRequest:
    """One row of work: the unit that the engine queues, batches and answers.

    ``params`` is what is wanted of one forward pass over the prompt: one thing or several. A smaller
    ``priority`` is served first. Rows of one ``group`` take turns with those of others as one: a client's
    request is a group, named by a number below 2⁶³ that is its own among all processes; 0 is a group of one row.
    """

    prompt: RenderedPrompt
    params: tuple[PoolingParams, ...] = (Embed(),)
    priority: int = 0
    group: int = 0

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

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        """Wait for the rows to be on the host: for each, what each of its ``params`` asked for."""


class Runner(Protocol):
    """Computes batches. Used from one thread at a time."""

    def launch(self, batch: Batch) -> PooledBatch:
        """Start the forward pass and return at once where the device is asynchronous.

        Raises ``RunnerDeadError`` when no later batch can succeed; any other exception condemns this
        batch alone.
        """

    def describe(self) -> str:
        """One line for people: what is loaded, and how it computes."""

    def open_scope(self) -> QueryScope:
        """Return a new place for queries' vectors; whoever opens it closes it. From any thread."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that open scopes hold."""

    @property
    def dimensions(self) -> int:
        """Length of the vectors when nothing is cut off; 0 if the model makes none."""

    @property
    def embeds_width(self) -> int:
        """Width of the token embeddings that rows may bring in place of ids; 0 if they may not."""

    @property
    def default_batch_tokens(self) -> int:
        """Padded tokens per batch that suit this device when nobody asked for a number."""

    @property
    def pads(self) -> bool:
        """Whether padding is computed like tokens are. If not, a batch takes the time of its own tokens only.

        It takes the memory of padded rows nonetheless: the states that heads read are padded.
        """


@frozen(eq=False)
class PoolingOutput:
    """One row of a finished batch, with the times (seconds) that its batch took.

    ``values`` are in the order of the request's ``params``.
    """

    values: tuple[PooledValue, ...]
    queue_s: float
    forward_s: float
    copy_s: float
