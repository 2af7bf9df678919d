"""Small batches replayed as CUDA graphs.

A transformer of twelve layers launches about two hundred kernels, which takes Python milliseconds however small the
batch is. A graph is one launch. It computes one shape, from and to its own memory, so a few shapes are captured when
the model is loaded, and a batch is padded to the next larger one. Padded rows are captured, not packed ones: with
padding only the mask's values differ between batches of a shape, whereas the lengths of packed segments decide how
kernels are launched.

A graph's memory is written by one batch after the other. The device works in the order in which the launching thread
enqueues: copies into a graph's inputs wait for the replay before, and the output is copied before the next replay, so
heads and copies to the host on another stream never read what a later batch writes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (16, 32, 64, 128, 256, 512)

MAX_CELLS = 4096
"""Limit of rows times tokens of a graph."""

MAX_PRODUCTS = 2**39
"""Limit of parameters times cells of a graph: above it a GPU computes for longer than Python launches."""


@frozen(order=True)
class Shape:
    """Number and length of the rows that a graph computes."""

    rows: int
    tokens: int

    @property
    def cells(self) -> int:
        """Computed tokens, padding included."""
        return self.rows * self.tokens


def shapes_to_capture(*, parameters: int, max_tokens: int) -> list[Shape]:
    """Return the shapes to capture, the largest first: smaller graphs then fit into the memory of larger ones."""
    max_cells = min(MAX_CELLS, MAX_PRODUCTS // max(1, parameters))
    tokens = sorted({min(length, max_tokens) for length in TOKENS})
    shapes = [Shape(rows, length) for rows in ROWS for length in tokens]
    return sorted((shape for shape in shapes if shape.cells <= max_cells), key=lambda shape: shape.cells, reverse=True)


class GraphBackend(Protocol):
    """Capturing on one kind of device. Tests implement it on CPU."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Return the tensor that ``compute`` writes its result to, and a function that computes it again."""


class CudaGraphBackend:
    """Captures CUDA graphs. They share their intermediate memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Compute twice on a side stream, because libraries allocate memory on first use; then capture."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other models' threads may allocate meanwhile; in any other mode the capture would fail.
        capturing: AbstractContextManager[Any] = torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        )
        # A failed capture leaves its stream the current one, so the stream is restored by an outer context.
        restored = torch.cuda.stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), restored, capturing:
            output = compute()
        self._pool = self._pool or graph.pool()
        return output, graph.replay


@frozen(eq=False)
class Graph:
    """A captured graph with its memory.

    ``inputs`` are [3, rows, tokens]: ids, mask, segments. ``empty`` are their values for unused cells.
    """

    inputs: Tensor
    empty: Tensor
    output: Tensor
    replay: Callable[[], Any]

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Compute rows, and return a copy of their output."""
        rows, tokens = forward.input_ids.shape
        self.inputs.copy_(self.empty)
        for target, source in zip(
            self.inputs, (forward.input_ids, forward.attention_mask, forward.type_ids), strict=True
        ):
            target[:rows, :tokens].copy_(source)
        self.replay()
        output = self.output[:rows]
        return (output[:, :tokens] if output.dim() == 3 else output).clone()


@define(eq=False)
class GraphedBackbone:
    """A backbone whose small batches are replayed as graphs; ``fallback`` computes batches that fit no graph."""

    backbone: Backbone
    fallback: Callable[[ForwardPass], Tensor]
    backend: GraphBackend
    pad_token_id: int
    _graphs: dict[Shape, Graph] = field(factory=dict, init=False)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        graph = self._graph_for(forward)
        return self.fallback(forward) if graph is None else graph(forward)

    @torch.inference_mode()
    def capture(self, shapes: Iterable[Shape], device: torch.device) -> None:
        """Capture graphs, one after the other. Raises the device's errors; no graphs are left then."""
        try:
            for shape in shapes:
                self._graphs[shape] = self._capture(shape, device)
        except Exception:
            self._graphs.clear()
            raise

    @property
    def shapes(self) -> Sequence[Shape]:
        """The captured shapes."""
        return tuple(self._graphs)

    def _capture(self, shape: Shape, device: torch.device) -> Graph:
        empty = torch.zeros((3, shape.rows, shape.tokens), dtype=torch.int64)
        empty[0] = self.pad_token_id
        empty[1, :, 0] = 1  # softmax over no tokens at all would be NaN
        empty = empty.to(device)
        inputs = empty.clone()
        output, replay = self.backend.capture(lambda: self.backbone.forward_ids(*inputs.unbind()))
        return Graph(inputs, empty, output, replay)

    def _graph_for(self, forward: ForwardPass) -> Graph | None:
        if any(request.prompt.embeds is not None for request in forward.requests):
            return None
        rows, tokens = forward.input_ids.shape
        fitting = [shape for shape in self._graphs if shape.rows >= rows and shape.tokens >= tokens]
        if not fitting:
            return None
        return self._graphs[min(fitting, key=lambda shape: shape.cells)]
