"""A backbone computed by OpenVINO, which takes about half the time of torch for short rows and holds no lock.

It is compiled twice. A pass that has all cores for itself uses them all; while several batches are computed at once,
each is computed by its share of the cores, which the threads of one pass then do not fight for. With the first planned
batch it is compiled again, for threads of idle priority.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import openvino as ov
import torch
from attrs import define, field, frozen
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.threads.dedicated_threads import at_idle_priority

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""OpenVINO's names of the precisions in which it computes what torch computes in a dtype."""

CACHED_KERNELS = 256
"""Kernels that OpenVINO keeps for the shapes of batches, one or two for each shape. Its default is 5,000: MiniLM grows
by 0.14 MB with each new shape, for more than 400 shapes. With 128 it stops growing, for 5 % more CPU time where every
batch has another shape. With 0 layers share no kernel: twice the memory, and a quarter more time."""


MIN_MULTIPLICATIONS = 5 * 10**8
"""A pass of fewer is computed by its share of the cores even when it could have all of them: a second thread waits for
the first more than it computes. One text of 34 tokens by MiniLM, 0.36 · 10⁹ of them: 12.0 ms on one thread and 9.0 on
two, for 1.4 times the CPU time; four texts 54 and 28 ms, for the same CPU time (AVX-512, float32)."""


@frozen
class CompileParams:
    """Precision, the cores to use, and how many passes are computed at a time.

    ``streams`` of them in this process, and ``sharers`` on these cores, those of other processes included; besides
    these ``idle_streams`` of planned batches, at idle priority and with a thread each.
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

    def take_request(self) -> ov.InferRequest:
        """Return a request that no pass uses."""
        try:
            return self.idle.pop()
        except IndexError:
            return self.model.create_infer_request()

    def __del__(self) -> None:
        last = [self.take_request()]
        self.idle.clear()
        del self.model
        last.clear()


@define(eq=False)
class Program:
    """A compiled model; any number of threads may compute with it at a time.

    After a pass that has failed it is compiled again, which takes half a second: OpenVINO (2026.4) computes no other
    batch of the shape of the last one before that, though it could.
    """

    compile_model: Callable[[], ov.CompiledModel]
    _compiled: CompiledModel = field(init=False)
    _compiling: threading.Lock = field(init=False, factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self._compiled = CompiledModel(self.compile_model())

    @property
    def compiled(self) -> ov.CompiledModel:
        """The model by which the next pass is computed."""
        return self._compiled.model

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, type_ids: Tensor) -> Tensor:
        """Return the output for ids [rows, tokens]; all three are int64. Releases the interpreter lock."""
        inputs = [tensor.numpy() for tensor in (input_ids, attention_mask, type_ids)]
        # Into memory of its own: the request's is overwritten by its next pass.
        output = torch.empty(self._output_shape(input_ids), dtype=torch.float32)
        compiled = self._compiled
        request = compiled.take_request()
        request.set_output_tensor(0, ov.Tensor(output.numpy(), shared_memory=True))
        try:
            # In OpenVINO's threads, which are as nice as the thread that compiled, and not in this one: it holds the
            # interpreter lock before and after, and while it waits for a core, so does the event loop.
            request.start_async(dict(enumerate(inputs[: len(compiled.model.inputs)])), share_inputs=True)
            request.wait()
        except RuntimeError:
            self._compile_again(compiled)
            raise
        compiled.idle.append(request)
        return output

    def _compile_again(self, failed: CompiledModel) -> None:
        """Have the next passes computed by another compiled model than the one by which a pass has failed."""
        with self._compiling:
            if self._compiled is failed:  # not yet, for another pass that has failed as well
                self._compiled = CompiledModel(self.compile_model())

    def _output_shape(self, input_ids: Tensor) -> tuple[int, ...]:
        """Return [rows, tokens, width], or [rows, labels] for logits of whole rows."""
        declared = self.compiled.output(0).get_partial_shape()
        return (*input_ids.shape[: len(declared) - 1], declared[len(declared) - 1].get_length())


@define(eq=False)
class OpenVinoBackbone:
    """``backbone``, computed by OpenVINO; rows of token embeddings are computed by ``backbone`` itself.

    As many passes as ``CompileParams`` say may be computed at a time, each called from a thread of its own. A pass uses
    at most as many threads as ``torch.get_num_threads()`` allows the calling thread: all cores, or its share of them.
    """

    backbone: Backbone
    model: ov.Model
    params: CompileParams
    for_all_cores: Program
    for_shares: Program
    _multiplications: int = field(init=False)
    """For each token."""
    _for_background: Program | None = field(default=None, init=False)
    _compiling: threading.Lock = field(init=False, factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self._multiplications = self.backbone.parameters - self.backbone.embedding_parameters

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns, in float32."""
        if any(request.prompt.embeds is not None for request in forward.requests):
            return self.backbone(forward)
        if self.params.idle_streams and forward.requests[0].planned is not None:
            return self._background_program()(forward.input_ids, forward.attention_mask, forward.type_ids)
        return self.forward_ids(forward.input_ids, forward.attention_mask, forward.type_ids)

    def forward_ids(self, input_ids: Tensor, attention_mask: Tensor, type_ids: Tensor) -> Tensor:
        """Return the output for ids [rows, tokens]; the mask and the segments are int64, too."""
        has_all_cores = torch.get_num_threads() >= self.params.cores > self.params.share
        pays = input_ids.numel() * self._multiplications >= MIN_MULTIPLICATIONS
        program = self.for_all_cores if has_all_cores and pays else self.for_shares
        return program(input_ids, attention_mask, type_ids)

    def _background_program(self) -> Program:
        """Return the program of planned batches. The first call compiles it, in half a second; it takes 40 MB more."""
        with self._compiling:
            if self._for_background is None:
                streams = self.params.idle_streams
                # A thread each: further ones would be from a pool that all programs share, whatever their priority.
                compile_model = _compilation(self.model, self.params.precision, threads=streams, streams=streams)
                self._for_background = Program(partial(at_idle_priority, compile_model))
            return self._for_background


def compile_model(backbone: Backbone, model: ov.Model, params: CompileParams) -> OpenVinoBackbone:
    """Return the backbone, computed as its converted ``model`` says. Blocks for up to a second."""
    threads = params.share * params.streams
    for_shares = Program(_compilation(model, params.precision, threads=threads, streams=params.streams))
    for_all_cores = for_shares
    if params.share < params.cores:
        for_all_cores = Program(_compilation(model, params.precision, threads=params.cores, streams=1))
    return OpenVinoBackbone(backbone, model, params, for_all_cores, for_shares)


def _compilation(model: ov.Model, precision: str, *, threads: int, streams: int) -> Callable[[], ov.CompiledModel]:
    """Return what compiles a model."""
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
        "CPU_RUNTIME_CACHE_CAPACITY": CACHED_KERNELS,
        "ENABLE_CPU_PINNING": False,  # the event loop has to run somewhere
    }
    return lambda: ov.Core().compile_model(model, "CPU", settings)
