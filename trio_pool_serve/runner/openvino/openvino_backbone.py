"""A backbone computed by OpenVINO, which takes about half the time of torch for short rows and holds no lock.

It is compiled twice. A pass that has all cores for itself uses them all; while several batches are computed at once,
each is computed by its share of the cores, which the threads of one pass then do not fight for.
"""

import threading
from typing import Any

import openvino as ov
import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""OpenVINO's names of the precisions in which it computes what torch computes in a dtype."""

CACHED_KERNELS = 256
"""Kernels that OpenVINO keeps for the shapes of batches, one or two for each shape. Its default is 5,000: MiniLM grows
by 0.14 MB with each new shape, for more than 400 shapes. With 128 it stops growing, for 5 % more CPU time where every
batch has another shape. With 0 layers share no kernel: twice the memory, and a quarter more time."""


@define(eq=False)
class OpenVinoBackbone:
    """``backbone``, computed from ``model``; rows of token embeddings are computed by ``backbone`` itself.

    ``streams`` passes may be computed at a time, each called from a thread of its own. A pass uses as many threads as
    ``torch.get_num_threads()`` allows the calling thread: all of ``cores``, or its share of them.
    """

    backbone: Backbone
    model: ov.Model
    precision: str
    cores: int
    streams: int = 1
    _for_all_cores: ov.CompiledModel = field(init=False)
    _for_shares: ov.CompiledModel = field(init=False)
    _requests: threading.local = field(init=False, factory=threading.local)
    """A request per calling thread: its buffers are used by one pass at a time."""

    def __attrs_post_init__(self) -> None:
        self._for_all_cores = self._compile(threads=self.cores, streams=1)
        share = max(1, self.cores // self.streams)
        self._for_shares = (
            self._compile(threads=share * self.streams, streams=self.streams)
            if share < self.cores
            else self._for_all_cores
        )

    def _compile(self, *, threads: int, streams: int) -> ov.CompiledModel:
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
            "CPU_RUNTIME_CACHE_CAPACITY": CACHED_KERNELS,
            "ENABLE_CPU_PINNING": False,  # the event loop has to run somewhere
        }
        return ov.Core().compile_model(self.model, "CPU", settings)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns, in float32."""
        if any(request.prompt.embeds is not None for request in forward.requests):
            return self.backbone(forward)
        return self.forward_ids(forward.input_ids, forward.attention_mask, forward.type_ids)

    def forward_ids(self, input_ids: Tensor, attention_mask: Tensor, type_ids: Tensor) -> Tensor:
        """Return the output for ids [rows, tokens]; the mask and the segments are int64, too."""
        compiled = self._for_all_cores if torch.get_num_threads() >= self.cores else self._for_shares
        request = self._request_of(compiled)
        inputs = dict(enumerate(tensor.numpy() for tensor in (input_ids, attention_mask, type_ids)))
        # Into memory of its own: the request's is overwritten by its next pass.
        output = torch.empty(self._output_shape(input_ids))
        request.set_output_tensor(0, ov.Tensor(output.numpy(), shared_memory=True))
        request.infer({index: inputs[index] for index in range(len(compiled.inputs))}, share_inputs=True)
        return output

    def _request_of(self, compiled: ov.CompiledModel) -> ov.InferRequest:
        requests: dict[ov.CompiledModel, ov.InferRequest] = self._requests.__dict__
        if compiled not in requests:
            requests[compiled] = compiled.create_infer_request()
        return requests[compiled]

    def _output_shape(self, input_ids: Tensor) -> tuple[int, ...]:
        """Return [rows, tokens, width], or [rows, labels] for logits of whole rows."""
        declared = self._for_all_cores.output(0).get_partial_shape()
        return (*input_ids.shape[: len(declared) - 1], declared[len(declared) - 1].get_length())
