"""Small batches replayed as CUDA graphs.

A transformer of twelve layers launches some two hundred kernels, and Python takes milliseconds for that however small
the batch. A graph is launched at once. It computes one shape, from and to memory of its own, so a few shapes are
captured when the model is loaded, and a batch is padded to the next of them. Padded rows are what is captured, and
not rows without padding, because there the mask is the only thing that differs between batches of a shape: the
lengths of segments would decide how kernels are launched.

A graph's memory is written by one batch after the other. The device does things in the order in which one thread
launches them: the copies into a graph's inputs wait for the replay before, and the output is copied out before the
next replay, so that heads, and copies to the host on another stream, never read what a later batch writes.
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
"""Rows times tokens of the largest graph."""

MAX_PRODUCTS = 2**39
"""Parameters times cells of the largest graph: past that a GPU computes for longer than Python launches."""


@frozen(order=True)
class Shape:
    """Of the rows that a graph computes."""

    rows: int
    tokens: int

    @property
    def cells(self) -> int:
        """Tokens that are computed, padding included."""
        return self.rows * self.tokens


def shapes_to_capture(*, parameters: int, max_tokens: int) -> list[Shape]:
    """Return the shapes worth a graph, the largest first: later ones then fit into the memory of those."""
    most = min(MAX_CELLS, MAX_PRODUCTS // max(1, parameters))
    tokens = sorted({min(length, max_tokens) for length in TOKENS})
    shapes = [Shape(rows, length) for rows in ROWS for length in tokens]
    return sorted((shape for shape in shapes if shape.cells <= most), key=lambda shape: shape.cells, reverse=True)


class GraphBackend(Protocol):
    """What a device must offer. Tests implement it on the processor."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Return the memory that ``compute`` writes its result to, and what computes it anew."""


class CudaGraphBackend:
    """The real one: graphs that share their intermediate memory, for they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Compute twice on a side stream, so that libraries have what they allocate on first use; then capture."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other models' threads may allocate meanwhile, which fails a capture in any other mode.
        capturing: AbstractContextManager[Any] = torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        )
        # A capture that fails leaves its stream the current one, unless somebody else puts things right.
        restored = torch.cuda.stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), restored, capturing:
            output = compute()
        self._pool = self._pool or graph.pool()
        return output, graph.replay


@frozen(eq=False)
class Graph:
    """A captured shape: ``inputs`` are [3, rows, tokens] (ids, mask, segments), and ``empty`` what they hold unused."""

    inputs: Tensor
    empty: Tensor
    output: Tensor
    replay: Callable[[], Any]

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Compute some rows, and return a copy of their output."""
        rows, tokens = forward.input_ids.shape
        self.inputs.copy_(self.empty)
        for place, given in zip(
            self.inputs, (forward.input_ids, forward.attention_mask, forward.type_ids), strict=True
        ):
            place[:rows, :tokens].copy_(given)
        self.replay()
        output = self.output[:rows]
        return (output[:, :tokens] if output.dim() == 3 else output).clone()


@define(eq=False)
class GraphedBackbone:
    """A backbone whose small batches are replayed; ``otherwise`` computes those that fit no graph."""

    backbone: Backbone
    otherwise: Callable[[ForwardPass], Tensor]
    backend: GraphBackend
    pad_token_id: int
    _graphs: dict[Shape, Graph] = field(factory=dict, init=False)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        graph = self._graph_for(forward)
        return self.otherwise(forward) if graph is None else graph(forward)

    @torch.inference_mode()
    def capture(self, shapes: Iterable[Shape], device: torch.device) -> None:
        """Capture graphs, one after the other. Fails as the device does, and leaves no graphs then."""
        try:
            for shape in shapes:
                self._graphs[shape] = self._capture(shape, device)
        except Exception:
            self._graphs.clear()
            raise

    @property
    def shapes(self) -> Sequence[Shape]:
        """What has been captured."""
        return tuple(self._graphs)

    def _capture(self, shape: Shape, device: torch.device) -> Graph:
        empty = torch.zeros((3, shape.rows, shape.tokens), dtype=torch.int64)
        empty[0] = self.pad_token_id
        empty[1, :, 0] = 1  # a row that attends to nothing has no numbers
        empty = empty.to(device)
        inputs = empty.clone()
        output, replay = self.backend.capture(lambda: self.backbone.of_ids(*inputs.unbind()))
        return Graph(inputs, empty, output, replay)

    def _graph_for(self, forward: ForwardPass) -> Graph | None:
        if any(request.prompt.embeds is not None for request in forward.requests):
            return None
        rows, tokens = forward.input_ids.shape
        fitting = [shape for shape in self._graphs if shape.rows >= rows and shape.tokens >= tokens]
        if not fitting:
            return None
        return self._graphs[min(fitting, key=lambda shape: shape.cells)]
