"""A runner without a model, for testing the engine and everything above it.

It computes predictable outputs from the token ids. A script (``on_launch``, ``gate``) makes it do what devices do at
the worst moment: wait, raise, die.
"""

import threading
from collections.abc import Callable

import numpy as np
from attrs import define, field

from trio_pool_serve.types import (
    Batch,
    Classify,
    ComputedBy,
    CopiedBatch,
    Embed,
    EmbedChunks,
    MaxSim,
    PooledBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    RunnerFacts,
    RunnerParams,
    SparseEmbed,
    SparseLookup,
    SparseVector,
    Steps,
    TokenClassify,
    TokenEmbed,
    TokenIds,
    Vectors,
)


def computed_by(fingerprint: str, dtype: str = "float32") -> ComputedBy:
    """Return what computes a scripted model whose weights have that fingerprint."""
    return ComputedBy(fingerprint, dtype, "torch")


def scripted_vector(token_ids: TokenIds, dimensions: int) -> Vectors:
    """Return the output for one row, shape (dimensions,): length, sum, first id, last id, zeros."""
    vector = np.zeros(max(dimensions, 4), dtype=np.float32)
    vector[:4] = len(token_ids), token_ids.sum(), token_ids[0], token_ids[-1]
    return vector[:dimensions]


@define(eq=False)
class ScriptedRunner:
    """Computes ``scripted_vector`` and the like; ``on_launch`` may block, raise, or return another handle.

    ``batches`` are the launched ones, in order. Clear ``gate`` to make launches wait. Loaders may return it: called, it
    is prepared.
    """

    dimensions: int = 8
    labels: int = 2
    default_batch_tokens: int = 64
    embeds_width: int = 0
    cosine_with_float32: float | None = None
    pads: bool = True
    device: str = "scripted"
    model_type: str = "scripted"
    concurrent_launches: int = 1
    has_own_threads: bool = False
    background_launches: int = 0
    takes_adapters: bool = True
    probe_request: PoolingRequest | None = None
    computed_by: ComputedBy = field(factory=ComputedBy)
    improvements: tuple[Callable[[], Steps], ...] = ()
    on_launch: Callable[[Batch], PooledBatch | None] | None = None
    on_prepare: Callable[[], object] | None = None
    max_batch_tokens: int | None = field(default=None, init=False)
    batches: list[Batch] = field(factory=list, init=False)
    launching: threading.Event = field(factory=threading.Event, init=False)
    """Set once the first launch has begun."""
    gate: threading.Event = field(factory=threading.Event, init=False)
    """Launches wait while it is cleared; set at first."""

    def __attrs_post_init__(self) -> None:
        self.gate.set()

    def return_memory(self) -> None:
        """Do nothing."""

    def __call__(self, params: RunnerParams) -> "ScriptedRunner":
        if self.on_prepare is not None:
            self.on_prepare()
        self.max_batch_tokens = params.max_batch_tokens or self.default_batch_tokens
        return self

    @property
    def facts(self) -> RunnerFacts:
        return RunnerFacts(
            max_batch_tokens=self.max_batch_tokens or self.default_batch_tokens,
            concurrent_launches=self.concurrent_launches,
            background_launches=self.background_launches,
            has_own_threads=self.has_own_threads,
            pads=self.pads,
            takes_adapters=self.takes_adapters,
            probe_request=self.probe_request,
            dimensions=self.dimensions,
            embeds_width=self.embeds_width,
            cosine_with_float32=self.cosine_with_float32,
            computed_by=self.computed_by,
            improvements=self.improvements,
            device=self.device,
            model_type=self.model_type,
        )

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch, or return the script's handle. Raises what the script raises."""
        self.batches.append(batch)
        self.launching.set()
        self.gate.wait()
        handle = self.on_launch(batch) if self.on_launch else None
        return handle or CopiedBatch(
            [tuple(self._value(request.prompt, param) for param in request.params) for request in batch.requests]
        )

    def _value(self, prompt: RenderedPrompt, param: PoolingParams) -> PooledValue:
        ids = prompt.token_ids
        kept = ids if prompt.kept is None else ids[prompt.kept]
        match param:
            case EmbedChunks(dimensions=cut):
                chunks = [] if prompt.chunks is None else prompt.chunks.tolist()
                return np.stack([scripted_vector(ids[begin:end], cut or self.dimensions) for begin, end in chunks])
            case Embed(dimensions=cut):
                return scripted_vector(ids, cut or self.dimensions)
            case TokenEmbed(dimensions=cut):
                return np.stack([scripted_vector(kept[i : i + 1], cut or self.dimensions) for i in range(len(kept))])
            case SparseEmbed():
                indices, counts = np.unique(ids, return_counts=True)
                return SparseVector(indices.astype(np.int32), counts.astype(np.float32))
            case SparseLookup():
                indices = np.unique(ids)
                return SparseVector(indices.astype(np.int32), np.ones(len(indices), dtype=np.float32))
            case Classify():
                return scripted_vector(ids, self.labels)
            case TokenClassify():
                return np.stack([scripted_vector(kept[i : i + 1], self.labels) for i in range(len(kept))])
            case MaxSim(query=query):
                return np.array([np.isin(query[:, 1], kept).sum()], dtype=np.float32)  # of its tokens, those here too
        raise TypeError(f"There is no scripted answer to {param}.")

    @property
    def rows(self) -> list[int]:
        """Number of rows of each launched batch."""
        return [len(batch.requests) for batch in self.batches]
