"""A graph computed by OpenVINO, which takes about half the time of torch for short rows and holds no lock.

It is compiled twice. A pass that has all cores for itself uses them all; while several batches are computed at once,
each is computed by its share of the cores, which the threads of one pass then do not fight for. With the first planned
batch it is compiled again, for threads of idle priority.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import openvino as ov
from attrs import Factory, define, field, frozen

from trio_pool_serve.processes.allocator import return_mapped_pages
from trio_pool_serve.runner.shared_cores import granted_threads
from trio_pool_serve.threads.dedicated_threads import at_idle_priority

T = TypeVar("T")

Arrays = Mapping[str, npt.NDArray[Any]]

Inputs = Mapping[str, npt.NDArray[Any] | ov.Tensor]

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}
"""OpenVINO's names of the precisions, by the model's dtype; for int8, of all that is not quantised."""

CACHED_KERNELS = 32
"""Kernels that OpenVINO keeps for the shapes of batches in each program, one or two for each shape; its default is
5,000. After 900 batches of MiniLM in bfloat16, nearly all of other shapes, two programs had grown by 296 MiB with 256,
by 128 with 64, by 92 with 32, and by 76 with 16, which took 12 % more CPU time; the others took as much as 256."""


@frozen
class CompileParams:
    """Precision, the cores to use, and the number of passes at a time.

    ``streams`` in this process, and ``sharers`` on these cores, other processes' included; besides
    these, ``idle_streams`` of planned batches, at idle priority and with a thread each.
    """

    precision: str
    cores: int
    streams: int = 1
    sharers: int = 1
    idle_streams: int = 0

    @property
    def share(self) -> int:
        """Threads of a pass while all ``sharers`` compute."""
        return max(1, self.cores // self.sharers)


@define(eq=False)
class CompiledModel:
    """OpenVINO's compiled model, and its requests whose buffers no pass uses.

    It is freed without the interpreter lock. That takes 40 to 80 ms, in which the destructor of OpenVINO's class would
    hold the lock; the destructor of a request does not (2026.4), so the last reference is a request's.
    """

    model: ov.CompiledModel
    idle: list[ov.InferRequest] = field(init=False, factory=list)
    _made: int = field(init=False, default=0)
    _taking: threading.Lock = field(init=False, factory=threading.Lock)

    def take_request(self) -> ov.InferRequest:
        """Return a request that no pass uses."""
        with self._taking:
            if self.idle:
                return self.idle.pop()
            request = self.model.create_infer_request()
            self._made += 1
            return request

    def return_memory(self) -> None:
        """Return the memory of the largest pass, unless a pass is computed or its outputs are read. Takes 2 ms."""
        with self._taking:
            if len(self.idle) == self._made:
                self.model.release_memory()

    def __del__(self) -> None:
        last = [self.take_request()]
        self.idle.clear()
        del self.model
        last.clear()


@define(eq=False)
class Program:
    """A compiled graph; any number of threads may compute with it at a time.

    After a pass that has failed it is compiled again, which takes half a second: OpenVINO (2026.4) computes no other
    batch of the shape of the last one before that, though it could.
    """

    model: ov.Model
    precision: str
    threads: int
    streams: int
    """Passes that may be computed at a time, with ``threads`` together."""
    is_idle: bool = False
    """Whether its threads have idle priority."""
    inputs: list[str] = field(
        init=False, default=Factory(lambda self: [given.any_name for given in self.model.inputs], takes_self=True)
    )
    """Names of the graph's inputs. A compiled model has further names for some of them, and for its outputs."""
    _outputs: list[str] = field(
        init=False, default=Factory(lambda self: [made.any_name for made in self.model.outputs], takes_self=True)
    )
    compiled: CompiledModel = field(init=False, default=Factory(lambda self: self._compile(), takes_self=True))
    _compiling: threading.Lock = field(init=False, factory=threading.Lock)

    def __call__(self, inputs: Inputs, read: Callable[[Arrays], T]) -> T:
        """Compute, and return ``read`` of the outputs: arrays by name, which the next pass overwrites.

        Releases the interpreter lock while it computes.
        """
        compiled = self.compiled
        request = compiled.take_request()
        try:
            # In OpenVINO's threads, which are as nice as the thread that compiled, and not in this one: it holds the
            # interpreter lock before and after, and while it waits for a core, so does the event loop.
            for number, name in enumerate(self.inputs):  # 80 µs less than by ``start_async``
                given = inputs[name]
                tensor = given if isinstance(given, ov.Tensor) else ov.Tensor(given, shared_memory=True)
                request.set_input_tensor(number, tensor)
            request.start_async()
            request.wait()
        except Exception:
            with self._compiling:
                if self.compiled is compiled:  # else another failed pass has replaced it
                    self.compiled = self._compile()
            raise
        try:
            return read({name: request.get_output_tensor(number).data for number, name in enumerate(self._outputs)})
        finally:
            compiled.idle.append(request)

    def _compile(self) -> CompiledModel:
        """Return the graph, compiled. Blocks for up to a second."""
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": self.streams,
            "CPU_RUNTIME_CACHE_CAPACITY": CACHED_KERNELS,
            "ENABLE_CPU_PINNING": False,  # the event loop has to run somewhere
        }
        compile_model = partial(ov.Core().compile_model, self.model, "CPU", settings)
        return CompiledModel(at_idle_priority(compile_model) if self.is_idle else compile_model())


@define(eq=False)
class Programs:
    """The programs of one graph: of a file, or of a ``model`` that was made from it.

    ``CompileParams`` gives the number of passes that may be computed at a time, each called from a thread of its own. A
    pass uses as many threads as ``granted_threads`` grants the calling thread: all cores, or its share of them. Raises
    ``RuntimeError`` for an unusable file.
    """

    graph: Path
    params: CompileParams
    model: ov.Model = Factory(lambda self: read_graph(self.graph), takes_self=True)
    for_shares: Program = field(init=False)
    for_all_cores: Program = field(init=False)
    _for_background: Program | None = field(default=None, init=False)
    _compiling: threading.Lock = field(init=False, factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        params = self.params
        self.for_shares = self._program(params.share * params.streams, params.streams)
        self.for_all_cores = self._program(params.cores) if params.share < params.cores else self.for_shares

    def _program(self, threads: int, streams: int = 1, *, is_idle: bool = False) -> Program:
        return Program(self.model, self.params.precision, threads, streams, is_idle)

    def return_memory(self) -> None:
        """Return memory of earlier passes, and pages of the weights, which the compiled graphs have copies of."""
        for program in {self.for_shares, self.for_all_cores, self._for_background}:
            if program is not None:
                program.compiled.return_memory()
        return_mapped_pages(self.graph.with_suffix(".bin"))
        with suppress(OSError):
            os.utime(self.graph.parent)  # a cache keeps the entries that are used

    def choose(self, *, is_planned: bool) -> Program:
        """Return the program for the calling thread's pass."""
        if self.params.idle_streams and is_planned:
            return self._background_program()
        has_all_cores = granted_threads(self.params.cores) >= self.params.cores
        return self.for_all_cores if has_all_cores else self.for_shares

    def _background_program(self) -> Program:
        """Return the program of planned batches. The first call compiles it, in half a second; it takes 40 MB more."""
        with self._compiling:
            if self._for_background is None:
                streams = self.params.idle_streams
                # A thread each: further ones would be from a pool that all programs share, whatever their priority.
                self._for_background = self._program(streams, streams, is_idle=True)
            return self._for_background


def read_graph(path: Path, **config: object) -> ov.Model:
    """Return a graph on disk, whose weights are mapped unless ``config``, OpenVINO's options, forbids it.

    Raises ``RuntimeError`` for an unusable file.
    """
    model: ov.Model = ov.Core().read_model(path, config=config)
    for node in model.get_ops():
        if node.get_type_name() == "Multiply" and _is_gate(node):
            # In bfloat16 with AMX, OpenVINO would compute a gated MLP by a kernel that divides by zero if a pass has
            # one thread (openvino issue 28550). It looks for products that may broadcast.
            node.set_attribute("auto_broadcast", "none")
    return model


def _is_gate(product: ov.Node) -> bool:
    """Return whether it multiplies the output of an activation by another of the same shape."""
    kinds = {factor.get_node().get_type_name() for factor in product.input_values()}
    return bool(kinds & {"Swish", "Gelu"}) and product.get_input_partial_shape(0) == product.get_input_partial_shape(1)


def write_graph(graph: ov.Model, path: Path) -> None:
    """Write a graph in float32. Raises ``OSError``, also if OpenVINO reports a full disk by an error of its own."""
    for file in (path, path.with_suffix(".bin")):
        file.unlink(missing_ok=True)  # another graph may be mapped
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:
        number = errno.ENOSPC if shutil.disk_usage(path.parent).free < 2**20 else errno.EIO
        raise OSError(number, f"{os.strerror(number)}: {error}", str(path)) from error
