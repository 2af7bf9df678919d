"""The types that packages pass to each other, from prompt to output.

``Prompt`` (as the client sent it: ``prompts.py``) → ``RenderedPrompt`` (token ids) → ``PoolingRequest`` (one row for
the engine) → ``Batch`` (the rows of one forward pass) → ``PooledBatch`` (a handle on its outputs) → ``PoolingOutput``
(the output of one row). Each stage takes the type of the stage before it and nothing else.

Types with an instance per row are msgspec structs, not attrs classes: creating one takes 0.1 to 0.2 µs, and a frozen
attrs instance with as many fields 0.8 to 1.7 µs.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Shape (tokens,)."""

Vectors: TypeAlias = npt.NDArray[np.float32]
"""Shape (rows, dimensions) for a batch, (dimensions,) for a row, (tokens, dimensions) for a row's tokens."""

PoolingTask: TypeAlias = Literal["embed", "token_embed", "sparse_embed", "classify", "token_classify", "score"]
"""The tasks that a model may support."""


@frozen(eq=False)
class ImageFeatures:
    """The output of an image processor for one image, or for the images of one input, in order.

    ``arrays`` are keyword arguments of the model's forward pass for one row: ``pixel_values`` (float32, in the model's
    shape) and other arrays that the model needs. ``tokens`` are the numbers of positions in the model's sequence that
    the images take.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class RenderedPrompt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The model's input for one row.

    ``instruction_tokens`` is the number of leading tokens that belong to the instruction, for models whose pooling
    excludes them. ``type_ids`` are the segments of a pair, ``None`` if all are 0. Only the first ``attended`` tokens
    are attended to, ``None`` for all; the others are a query's expansion. ``kept`` (bool, one per token) selects the
    tokens whose vectors are output, ``None`` for all. ``chunks`` (int32, shape (chunks, 2)) are the first token of each
    chunk of a document and the one after its last, for ``EmbedChunks``. ``route`` is the number of the model's route
    whose tokenizer made the ids and which computes them, 0 for models with one.

    ``images`` stand among the tokens, or are the whole input; then the ids are zeros, one for each position of the
    images. ``embeds`` (float32, float16, or uint16 holding bfloat16; shape (tokens, hidden)) replace the ids, which are
    zeros then.
    """

    token_ids: TokenIds
    instruction_tokens: int = 0
    type_ids: TokenIds | None = None
    attended: int | None = None
    kept: npt.NDArray[np.bool_] | None = None
    images: ImageFeatures | None = None
    embeds: npt.NDArray[np.float32 | np.float16 | np.uint16] | None = None
    chunks: npt.NDArray[np.int32] | None = None
    route: int = 0


class PoolingParams:
    """An output of a forward pass over a prompt: the base class of one frozen attrs class per head.

    A subclass may be defined anywhere, for example in the module of its head. Its name and its fields, arrays or types
    that msgspec decodes, are sent to engines in other processes, which find it by that name once the module that
    defines it has been imported there. Loading the head imports it.
    """

    __slots__ = ()
    by_name: ClassVar[dict[str, type["PoolingParams"]]] = {}
    """All subclasses, by ``wire_name``."""
    wire_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # attrs creates classes with slots again, which calls this twice; the second class is used.
        cls.wire_name = f"{cls.__module__}:{cls.__qualname__}"
        PoolingParams.by_name[cls.wire_name] = cls


@frozen
class Embed(PoolingParams):
    """One vector: float32, shape (dimensions,).

    ``dimensions`` truncates the vector (matryoshka). ``normalize`` scales it to unit length afterwards; ``None`` is the
    model's default.
    """

    dimensions: int | None = None
    normalize: bool | None = None


@frozen
class EmbedChunks(Embed):
    """A vector for each of the prompt's ``chunks``: float32, shape (chunks, dimensions)."""


@frozen
class TokenEmbed(PoolingParams):
    """One vector for each kept token: float32, shape (tokens, dimensions); the fields are those of ``Embed``."""

    dimensions: int | None = None
    normalize: bool | None = None


@frozen
class SparseEmbed(PoolingParams):
    """Weights over the vocabulary, or over the latents of a sparse autoencoder, by a forward pass: a ``SparseVector``.

    Only the ``max_active_dims`` greatest weights are returned; ``None`` is the model's default.
    """

    max_active_dims: int | None = None


@frozen
class SparseLookup(PoolingParams):
    """Weights of the text's own tokens, looked up without a forward pass; otherwise as ``SparseEmbed``."""

    max_active_dims: int | None = None


Activation: TypeAlias = Literal["probabilities", "score", "raw"]
"""Function applied to a classifier's logits. probabilities: softmax or sigmoid, as the model was trained. score: the
activation in a cross-encoder's config, by default a sigmoid. raw: none."""


@frozen
class Classify(PoolingParams):
    """One number per label: float32, shape (labels,)."""

    activation: Activation = "probabilities"


@frozen
class TokenClassify(PoolingParams):
    """One number per label for each kept token: float32, shape (tokens, labels)."""

    activation: Activation = "probabilities"


@lru_cache(4096)
def _number_of(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(errors="replace"), digest_size=8).digest(), "big") >> 1


@frozen
class Client:
    """The sender of a request for fairness and limits: the name of an API key, or an address.

    ``number`` identifies it in queues: below 2⁶³, the same in all processes. ``may_outrank``: its priorities count
    against other clients' too, not only among its own requests. ``is_background``: its requests are never refused, and
    their rows are computed after all others, or beside them at idle priority.
    """

    label: str = ""
    may_outrank: bool = False
    is_background: bool = False
    number: int = field(init=False, default=Factory(lambda self: _number_of(self.label), takes_self=True))


@frozen
class MaxSim(PoolingParams):
    """The maximum dot product of each query vector with this row's token vectors, summed over the query.

    ``query`` is the output of ``TokenEmbed`` for the query and must not be modified. Output: float32, shape (1,).
    Khattab and Zaharia, https://arxiv.org/abs/2004.12832, eq. 3.
    """

    query: Vectors = field(eq=np.ndarray.tobytes)


@frozen(eq=False)
class SparseVector:
    """Weights above zero: int32 ``indices`` of tokens or latents, ascending, and float32 ``values``, both (n,)."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


PooledValue: TypeAlias = Vectors | SparseVector
"""The output for one row and one of its ``PoolingParams``."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: the folder of its files, read where a row that names it is first computed, and their digest."""

    folder: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class PoolingRequest(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One row: the unit that the engine queues, batches and computes.

    ``params`` are the outputs to compute from one forward pass over the prompt, at least one. Rows with a smaller
    ``rank`` are computed first; ``client`` is the number of a ``Client``, among whose rows a smaller ``priority`` is
    computed first. ``group`` is the request group: rows with the same number share one turn in the queue. Each client
    request has its own number below 2⁶³, unique among all processes; 0 is a group of this row alone. After
    ``deadline``, in seconds of trio's clock, nobody waits for the row. A row with ``planned`` is background work: it is
    computed in exactly the batch with that number. ``adapter`` is added to the model's weights for this row.
    """

    prompt: RenderedPrompt
    params: tuple[PoolingParams, ...] = (Embed(),)
    priority: int = 0
    group: int = 0
    client: int = 0
    rank: int = 0
    deadline: float = math.inf
    planned: int | None = None
    adapter: Adapter | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the model computes for this row."""
        return len(self.prompt.token_ids)


@frozen(eq=False)
class Batch:
    """The rows of one forward pass."""

    requests: tuple[PoolingRequest, ...]

    @property
    def is_planned(self) -> bool:
        """Whether its rows were chosen by the submitter."""
        return self.requests[0].planned is not None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of all its rows."""
        return self.requests[0].adapter

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(request.prompt.token_ids) for request in self.requests]

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows together, without padding."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens with every row padded to the longest."""
        return len(self.requests) * self.longest


class PooledBatch(Protocol):
    """The handle on a launched batch: ``await handle`` returns the outputs of its rows, in the batch's order.

    Cancellation: at once; the device goes on computing, and its buffers live until it is done.
    """

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        """Wait until the outputs are on the host; return a tuple per row, with a value for each of its ``params``."""


@frozen(eq=False)
class CopiedBatch:
    """Outputs that are on the host when ``launch`` returns: awaiting them does not wait."""

    rows: list[tuple[PooledValue, ...]]

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        return self.rows
        yield  # makes this a generator, as ``await`` requires


class ComputedBy(NamedTuple):
    """What computes a model's outputs; empty if unknown. If engines differ, their values are joined by ``", "``."""

    fingerprint: str = ""
    dtype: str = ""
    backend: str = ""


@frozen(kw_only=True)
class RunnerFacts:
    """A loaded model and how its batches are computed; as text, a line for the log.

    Of a model in another process, only the fields that ``Hello`` has are known; the others have their defaults.
    """

    max_batch_tokens: int
    """The token budget of a batch, which may have been reduced to fit into memory."""
    concurrent_launches: int = 1
    """Number of threads that may call ``launch`` at a time; with ``has_own_threads`` one more may."""
    background_launches: int = 0
    """Number of additional threads that may launch planned batches, computed at idle priority."""
    has_own_threads: bool = False
    """Whether forward passes run in other threads than the launching ones, without the interpreter lock."""
    pads: bool = True
    """Whether padding is computed. If not, a batch's duration and memory depend only on its tokens."""
    takes_adapters: bool = False
    probe_request: PoolingRequest | None = None
    """A row of a few tokens that the model can compute; ``None`` if none is known."""
    dimensions: int = 0
    """Length of the vectors before truncation; 0 if the model has no vectors."""
    embeds_width: int = 0
    """Width of token embeddings in place of ids; 0 if they are not accepted."""
    cosine_with_float32: float | None = None
    """Mean cosine of a quantised model's vectors with float32, over some texts; ``None`` for other models."""
    computed_by: ComputedBy = field(factory=ComputedBy)
    requested_dtype: str = "auto"
    why_float32: str = ""
    """Why float32 computes it where ``auto`` would choose another dtype; empty if it does not."""
    device: str = ""
    model_type: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    """Bytes of all parameters, as torch loads them."""
    max_tokens: int = 0
    heads: str = ""
    computation: tuple[str, ...] = ()
    """How batches are computed and why so, in words, as ``heads`` are."""
    improvements: tuple[Callable[[], "Steps"], ...] = ()
    """Each prepares a faster way to compute, for seconds to minutes, while batches are computed."""

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on this machine's cores, with up to ``torch.get_num_threads()`` threads."""
        return self.device == "cpu"

    def __str__(self) -> str:
        dtype = self.computed_by.dtype
        reason = "native bfloat16" if dtype == "bfloat16" else self.why_float32 or "no native bfloat16"
        chosen = f" (auto: {reason})" if self.requested_dtype == "auto" else ""
        dimensions = f", {self.dimensions} dimensions" if self.dimensions else ""
        return (
            f"{self.model_type}, {self.parameters / 1e6:.1f} M parameters, {dtype} on {self.device}{chosen}, "
            f"{self.heads}{dimensions}, {self.max_tokens} tokens{''.join(f', {each}' for each in self.computation)}"
        )


Steps: TypeAlias = Sequence[Callable[[], None]]
"""They change over to an improvement one by one: in the thread that launches batches, between two of them."""


class Runner(Protocol):
    """Computes batches, in as many threads at a time as its facts allow."""

    @property
    def facts(self) -> RunnerFacts:
        """The model and how its batches are computed; they never change."""

    def launch(self, batch: Batch) -> PooledBatch:
        """Start the forward pass; return without waiting if the device is asynchronous.

        Raises ``RunnerDeadError`` if all later batches would fail, and ``OutOfDeviceMemoryError`` if a smaller batch
        may succeed; any other exception fails this batch only. A failed batch is launched again in parts, except after
        ``AdapterError``, which all of its rows would raise.
        """

    def return_memory(self) -> None:
        """Free memory that is kept for later batches. Blocks for milliseconds; other threads may launch meanwhile."""


@frozen
class RunnerParams:
    """Settings of the server for all runners; by default, they have the token budget of their model and device."""

    max_batch_tokens: int | None = None
    takes_embeds: bool = False
    memory_share: Callable[[Callable[[], int]], int] | None = None  # on a shared GPU: see ``load_with_share``


Prepare: TypeAlias = Callable[[RunnerParams], Runner]
"""The second step of loading, after all models of a start have done the first: decides how batches are computed. Called
once; may block for minutes. Raises ``ModelLoadError``."""


class PoolingOutput(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The ``values`` of a row in the order of its ``params``, and how long it waited and was computed, in seconds."""

    values: tuple[PooledValue, ...]
    queue_s: float
    forward_s: float
    copy_s: float
