"""A backbone compiled by ``torch.compile``.

Compiling takes half a minute or more, and whatever is compiled for itself takes as long again. So rows and tokens are
symbols: one row is compiled, and several rows are, both for any number of tokens. A mask and segments are always
handed over, for without them there would be more to compile. Whatever still does not fit is computed uncompiled: no
request waits for a compiler.
"""

from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.probe import TOLERANCES
from trio_pool_serve.runner.progress import shown

TRACED = ((2, 24), (1, 24))
"""Rows and tokens, each of which is compiled: torch treats a size of one as another program."""


class CompiledDiffersError(Exception):
    """Raised if compiled code computes something else."""


@define(eq=False)
class CompiledBackbone:
    """``backbone``, compiled for rows of two and more tokens."""

    backbone: Backbone
    device: torch.device
    _of_ids: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Frozen, weights are packed for the processor's kernels; they take their memory a second time.
        options: dict[str, str | int | bool | Any] = {"freezing": self.device.type == "cpu"}
        self._of_ids = torch.compile(self.backbone.of_ids, dynamic=True, options=options)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        embedded = any(request.prompt.embeds is not None for request in forward.requests)
        if embedded or forward.input_ids.shape[1] < 2:
            return self.backbone(forward)
        output = self._of_ids(forward.input_ids, forward.attention_mask, forward.type_ids)
        assert isinstance(output, Tensor)  # noqa: S101
        return output

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile, and compare with what is not. From then on nothing is compiled any more, in the whole process.

        Raises ``CompiledDiffersError``, or what the compiler raises.
        """
        torch.compiler.set_stance("default")
        for rows, tokens in shown(TRACED, "Compiling"):
            # Lengths that were not compiled as well: symbols have to hold for those.
            for length in (tokens, tokens // 2 + 1):
                self._compare(rows, length)
        torch.compiler.set_stance("eager_on_recompile")

    def _compare(self, rows: int, tokens: int) -> None:
        ids = torch.arange(3, 3 + rows * tokens).view(rows, tokens).to(self.device)
        mask = torch.ones_like(ids)
        mask[-1, tokens // 2 :] = 0
        inputs = (ids, mask, torch.zeros_like(ids))
        expected, ours = self.backbone.of_ids(*inputs).float(), self._of_ids(*inputs).float()
        if expected.dim() == 3:
            expected, ours = expected[mask.bool()], ours[mask.bool()]
        difference = float((ours - expected).norm() / expected.norm())
        if not difference <= TOLERANCES[next(self.backbone.model.parameters()).dtype]:
            raise CompiledDiffersError(f"compiled, its output differs by {difference:.2g}")
