"""The choice of how a backbone is computed: directly, compiled, packed, or from CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from attrs import Factory, define, field, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.runner.comparison import TOLERANCES, difference, probe_rows, states_of
from trio_pool_serve.runner.cuda.graphs import (
    CudaGraphBackend,
    GraphedBackbone,
    shapes_to_capture,
    synchronisations_refused,
)
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_backbone
from trio_pool_serve.runner.cuda.varlen import FLASH, CannotPackError, has_flash
from trio_pool_serve.runner.forward_pass import Compute, ForwardPass
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.transformer_masks import skip_mask_checks
from trio_pool_serve.telemetry.start_display import report_items
from trio_pool_serve.types import RenderedPrompt

TRACED = ((2, 24), (1, 24))
"""(rows, tokens) in the traces of the two compiled programs: torch specialises on a size of one."""


@define(eq=False)
class CompiledBackbone:
    """``backbone``, compiled by ``torch.compile`` for rows of two and more tokens.

    Compiling takes half a minute or more, for each program. So numbers of rows and tokens are symbolic, and only two
    programs are compiled: one row, and several rows, both of any number of tokens. Mask and segments are always passed,
    since calls without them would be further programs. Rows that fit neither program are computed uncompiled: no
    request waits for the compiler. MiniLM in bfloat16 on one thread takes 0.78, 0.89 and 0.96 times the CPU time then,
    for 1, 8 and 32 rows of 34 tokens.
    """

    backbone: Backbone
    device: torch.device
    _of_ids: Any = field(
        init=False,
        default=Factory(
            lambda self: torch.compile(
                self.backbone.forward_ids, dynamic=True, options={"freezing": self.device.type == "cpu"}
            ),
            takes_self=True,
        ),
    )
    """With freezing, weights are packed for the CPU's kernels; this takes the memory of the weights a second time."""

    def __call__(self, forward: ForwardPass) -> RowStates:
        """Return the states of rows, as ``backbone`` does."""
        if forward.has_embeds or forward.has_adapter or forward.input_ids.shape[1] < 2:
            return self.backbone(forward)
        return RowStates.of_output(self._of_ids(*forward.padded), forward.lengths)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile, and compare with the uncompiled backbone. Afterwards nothing is compiled in the whole process.

        Raises ``ValueError`` if its output differs, or the compiler's errors.
        """
        torch.compiler.set_stance("default")
        for rows, tokens in report_items(TRACED, "compiling"):
            # Also a length that was not compiled: the symbolic sizes must hold for it.
            for length in (tokens, tokens // 2 + 1):
                self._compare(rows, length)
        torch.compiler.set_stance("eager_on_recompile")

    def _compare(self, rows: int, tokens: int) -> None:
        ids = torch.arange(3, 3 + rows * tokens).view(rows, tokens).to(self.device)
        mask = torch.ones_like(ids)
        mask[-1, tokens // 2 :] = 0
        inputs = (ids, mask, torch.zeros_like(ids))
        expected, ours = self.backbone.forward_ids(*inputs).float(), self._of_ids(*inputs).float()
        if expected.dim() == 3:
            expected, ours = expected[mask.bool()], ours[mask.bool()]
        relative = difference([ours], [expected])
        if not relative <= TOLERANCES[next(self.backbone.model.parameters()).dtype]:
            raise ValueError(f"its compiled output differs by {relative:.2g} (relative)")


Capture: TypeAlias = Callable[[int], str]
"""Captures CUDA graphs for batches of up to this many tokens, and returns words for the log."""


@frozen(eq=False)
class Computation:
    """A way to compute batches: its function, whether padding is computed (CUDA graphs aside), words for the log."""

    compute: Compute
    pads: bool = True
    about: tuple[str, ...] = ()
    capture: Capture | None = None


def refuse_impossible(backbone: Backbone, config: ModelConfig, params: LoadingParams) -> None:
    """Raise ``ModelLoadError`` for settings with which a model cannot be computed, before anything takes long."""
    on_cpu = params.device.type == "cpu"
    require(
        config.dtype != "int8" or (on_cpu and config.backend not in ("torch", "compile")),
        "--dtype int8 requires OpenVINO on CPU, and excludes --backend torch and compile.",
    )
    require(
        config.backend != "openvino" or on_cpu,
        f"--backend openvino computes only on CPU, not on {params.device}; set --device cpu.",
    )
    require(
        config.backend != "compile" or type(backbone) is Backbone,
        "--backend compile: models that read images cannot be compiled.",
    )


def choose_computation(loaded: LoadedModel, config: ModelConfig, params: LoadingParams, why_torch: str) -> Computation:
    """Return the fastest computation by torch that the settings allow and whose output agrees with the backbone's.

    ``why_torch`` is the reason why OpenVINO does not compute it. Raises ``ModelLoadError`` if the computation that the
    settings demand fails.
    """
    if params.device.type != "cpu":
        skip_mask_checks(loaded.backbone.model)
    if config.backend == "compile":
        compiled = CompiledBackbone(loaded.backbone, params.device)
        try:
            compiled.compile()
        except Exception as error:
            raise ModelLoadError(f"--backend compile: the model cannot be compiled: {error}") from error
        return Computation(compiled, about=("compiled",))
    if params.device.type == "cpu":
        return Computation(loaded.backbone, about=(f"by torch ({why_torch})",))
    try:
        packed = _pack(loaded.backbone, config, params)
    except CannotPackError as reason:
        return Computation(loaded.backbone, about=(f"padded ({reason})",))
    about = ("without padding",)
    if loaded.output_width:  # a vocabulary's logits take memory, and take long to compute
        return Computation(packed, pads=False, about=about)
    graphs = GraphedBackbone(packed, CudaGraphBackend(params.device), params.device)
    return Computation(graphs, pads=False, about=about, capture=partial(_capture, graphs, params))


def _pack(backbone: Backbone, config: ModelConfig, params: LoadingParams) -> PackedBackbone:
    """Return the packed backbone; raises ``CannotPackError``."""
    require(config.backend != "torch", "as configured", CannotPackError)
    require(params.dtype != torch.float32, "packed attention does not support float32", CannotPackError)
    require(has_flash(), "this version of torch has no variable-length attention", CannotPackError)
    return pack_backbone(
        backbone, FLASH, pad_token_id=params.pad_token_id, max_tokens=params.max_tokens, device=params.device
    )


def _capture(graphs: GraphedBackbone, params: LoadingParams, max_batch_tokens: int) -> str:
    """Capture graphs, and return words for the log; none are left if capturing fails or their output differs."""
    backbone = graphs.packed.backbone
    shapes = shapes_to_capture(
        parameters=backbone.parameters - backbone.embedding_parameters,
        max_tokens=params.max_tokens,
        max_batch_tokens=max_batch_tokens,
    )
    graphs.clear()
    rows = [RenderedPrompt(row) for row in probe_rows(backbone.vocab_size, (min(12, params.max_tokens), 5, 1))]
    outputs_of = partial(states_of, prompts=rows, pad_token_id=params.pad_token_id, device=params.device)
    try:
        # A failed capture keeps its memory (pytorch issue 190348), so code that waits for the device is not captured.
        with synchronisations_refused(params.device):
            expected = outputs_of(graphs.packed)
        graphs.capture(report_items(shapes, "capturing CUDA graphs"))
        ours = outputs_of(graphs)
    except Exception as error:
        return f"no CUDA graphs ({repr(error).splitlines()[0]})"
    if not difference(ours, expected) <= TOLERANCES[params.dtype]:
        graphs.clear()
        return "no CUDA graphs (they differ)"
    return f"{len(graphs.shapes)} CUDA graphs"
