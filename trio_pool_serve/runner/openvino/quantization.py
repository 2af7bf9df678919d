"""The quantisation of a converted model's backbone to int8."""

import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

import openvino as ov
from attrs import frozen

from trio_pool_serve.runner.openvino.graph import quiet
from trio_pool_serve.runner.openvino.inputs import PaddedRows
from trio_pool_serve.runner.progress import with_progress_bar
from trio_pool_serve.types import PoolingRequest, RenderedPrompt


@frozen(eq=False)
class _Samples:
    """The inputs of rows, each a batch by itself, with a progress bar each time that they are iterated over."""

    prompts: Sequence[RenderedPrompt]
    names: Sequence[str]
    pad_token_id: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for prompt in with_progress_bar(self.prompts, "Quantising"):
            yield PaddedRows([PoolingRequest(prompt)], self.pad_token_id).arrays(self.names)

    def __len__(self) -> int:
        return len(self.prompts)


def quantize(
    model: ov.Model, prompts: Sequence[RenderedPrompt], *, pad_token_id: int, halves_range: bool = False
) -> ov.Model:
    """Return the model with its backbone's weights and activations in int8, in the ranges that they have for prompts.

    The heads stay as they are: they are small. With ``halves_range`` no sum of two products overflows at 16 bits, as
    weights take half of the range. Blocks: 13 s for MiniLM and 50 prompts, minutes for larger models. Raises what NNCF
    raises: any ``Exception``.
    """
    import nncf  # takes 3 s, and is needed only for this

    names = [model_input.get_any_name() for model_input in model.inputs]
    with quiet(), redirect_stdout(io.StringIO()):  # NNCF's own progress bars
        quantized: ov.Model = nncf.quantize(
            model,
            nncf.Dataset(_Samples(prompts, names, pad_token_id)),
            ignored_scope=nncf.IgnoredScope(names=_outside_the_backbone(model), validate=False),
            model_type=nncf.ModelType.TRANSFORMER,  # smooths activations, and leaves out what transformers need exact
            subset_size=len(prompts),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE if halves_range else nncf.OverflowFix.FIRST_LAYER
            ),
        )
    return quantized


def _outside_the_backbone(model: ov.Model) -> list[str]:
    """Return the names of the heads' matrix products."""
    products = [node.get_friendly_name() for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    return [name for name in products if not name.startswith("__module.model")]
