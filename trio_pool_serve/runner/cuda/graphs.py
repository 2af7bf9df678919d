"""Packed batches replayed as CUDA graphs.

A transformer of twelve layers launches about two hundred kernels, which takes Python milliseconds however small the
batch is, and all of them with the interpreter lock. A graph is one launch. What determines the kernels of a packed
batch is its ``PackedShape``; lengths and contents are data. So a few shapes are captured when the model is loaded, and
a batch is computed in the smallest that it fits into. Tokens of a shape that belong to no row are computed for nothing,
except by attention.

A graph's memory is written by one batch after the other, and all graphs share their intermediate memory. The device
works in the order in which the launching thread enqueues: the copy into a graph's inputs waits for the replay before,
and the output is copied before the next replay, so heads and copies to the host on another stream never read what a
later batch writes.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from trio_pool_serve.errors import OutOfDeviceMemoryError, require
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone
from trio_pool_serve.runner.cuda.packed_inputs import PackedInputs, PackedShape, fill, shape_of
from trio_pool_serve.runner.cuda.varlen import CannotPackError
from trio_pool_serve.runner.device_memory import computed_or_out_of_memory
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.torch_device import release_caches

LONGEST = (128, 512)
"""Longest rows of shapes. Attention computes 128 queries at a time [flash attention, for heads of 64]: whether the
longest row has 20 tokens or 128, it launches as many blocks."""

TOKENS_PER_ROW = 8
"""A shape's tokens divided by this are its most rows. An estimate, as all limits here: not measured on a GPU yet."""

MAX_ROWS = 1024

MIN_TOKENS = 16

MAX_PRODUCTS = 2**42
"""Limit of parameters times tokens of a shape: above it, a GPU computes for so much longer than Python launches that
graphs would only take memory (estimated). It admits BERT-base with 16,384 tokens."""


def shapes_to_capture(*, parameters: int, max_tokens: int, max_batch_tokens: int) -> list[PackedShape]:
    """Return the shapes to capture, the largest first: smaller graphs then fit into the memory of larger ones.

    Their tokens are powers of two and the numbers half-way between, so at most half of a batch's tokens are added.
    """
    most = min(max_batch_tokens, MAX_PRODUCTS // max(1, parameters))
    counts = [
        tokens
        for power in range(MIN_TOKENS.bit_length() - 1, most.bit_length())
        for tokens in (2**power, 3 * 2 ** (power - 1))
        if tokens <= most
    ]
    longest = sorted({min(length, max_tokens) for length in LONGEST})
    return sorted(
        {
            PackedShape(tokens, min(MAX_ROWS, -(-tokens // TOKENS_PER_ROW)), min(length, tokens))
            for tokens in {*counts, max_batch_tokens}
            if tokens <= most
            for length in longest
        },
        reverse=True,
    )


@contextmanager
def synchronisations_refused(device: torch.device) -> Iterator[None]:
    """Within the block, torch raises ``RuntimeError`` for synchronisations, in all threads."""
    cuda: Any = torch.get_device_module(device)
    before = cuda.get_sync_debug_mode()
    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
    try:
        cuda.set_sync_debug_mode("error")
        yield
    finally:
        cuda.set_sync_debug_mode(before)


class CudaGraphBackend:
    """Captures CUDA graphs. They share one pool of memory, since they never run at the same time.

    All are captured on one stream: a pool's memory is used again only on the stream that it was allocated on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.get_device_module(device)
        self._stream = self._cuda.Stream(device)
        self._pool: Any = None

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Return the tensor that ``compute`` writes its result to, and a function that computes it again.

        Computes once on a side stream, because libraries allocate memory on first use; then captures.
        """
        cuda, current = self._cuda, self._cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = cuda.CUDAGraph()
        # Other models' threads may allocate meanwhile; in any other mode the capture would fail.
        capturing: AbstractContextManager[Any] = cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # A failed capture leaves its stream the current one, so the stream is restored by an outer context.
        with cuda.device(self.device), cuda.stream(current), capturing:
            output = compute()
        self._pool = self._pool or graph.pool()
        return output, graph.replay


@frozen(eq=False)
class Graph:
    """A captured graph with the memory of its inputs, ``PackedInputs`` in one buffer, and of its output."""

    shape: PackedShape
    inputs: Tensor
    output: Tensor
    replay: Callable[[], Any]


@define(eq=False)
class GraphedBackbone:
    """A packed backbone whose plain batches are replayed as graphs, if they fit one; ``packed`` computes the others."""

    packed: PackedBackbone
    backend: CudaGraphBackend
    device: torch.device
    _graphs: list[Graph] = field(factory=list, init=False)
    """The captured graphs, in order of their shapes."""

    def __call__(self, forward: ForwardPass) -> RowStates:
        """Return the states of rows, as ``packed`` does."""
        return self.packed.divide(forward, self._replay)

    def _replay(self, forward: ForwardPass) -> RowStates:
        wanted = shape_of(forward.lengths)
        graph = next((graph for graph in self._graphs if wanted.fits(graph.shape)), None)
        if graph is None or forward.has_embeds or forward.has_adapter:
            return self.packed.compute_packed(forward)
        graph.inputs.copy_(fill(graph.shape, forward, self.packed.rule), non_blocking=True)
        graph.replay()
        # As much as belongs to rows, in memory that the next replay does not write.
        return self.packed.states_of(graph.output, forward).copied()

    @torch.inference_mode()
    def capture(self, shapes: Iterable[PackedShape]) -> None:
        """Capture graphs one after the other, except shapes that do not fit into the device's memory.

        Raises the device's other errors; no graphs are left then.
        """
        try:
            for shape in shapes:
                with suppress(OutOfDeviceMemoryError):
                    self._graphs.insert(0, self._capture(shape))
        except Exception:
            self.clear()
            raise

    @torch.inference_mode()
    def renew(self, shape: PackedShape, agrees: Callable[["GraphedBackbone"], bool]) -> None:
        """Capture the graph of a shape again, of ``packed.fused``; without memory, the graph stays.

        Raises ``CannotPackError`` unless what the new graph alone computes ``agrees``, and the device's other errors.
        """
        with suppress(OutOfDeviceMemoryError):
            renewed = GraphedBackbone(self.packed, self.backend, self.device)
            renewed._graphs.append(self._capture(shape))
            require(agrees(renewed), "its CUDA graphs differ", CannotPackError)
            self._graphs[self.shapes.index(shape)] = renewed._graphs[0]

    def clear(self) -> None:
        """Drop all graphs, and return their memory."""
        self._graphs.clear()
        release_caches(self.device)

    @property
    def shapes(self) -> Sequence[PackedShape]:
        """The captured shapes."""
        return tuple(graph.shape for graph in self._graphs)

    def _capture(self, shape: PackedShape) -> Graph:
        buffer = torch.zeros(shape.nbytes, dtype=torch.uint8, device=self.device)
        compute = partial((self.packed.fused or self.packed).compute, PackedInputs.of_buffer(shape, buffer))
        capture = partial(self.backend.capture, compute)
        output, replay = computed_or_out_of_memory(capture, partial(release_caches, self.device))
        return Graph(shape, buffer, output, replay)
