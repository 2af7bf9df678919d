"""A backbone compiled by ``torch.compile``.

Compiling takes half a minute or more, for each program. So numbers of rows and tokens are symbolic, and only two
programs are compiled: one row, and several rows, both of any number of tokens. Mask and segments are always passed,
since calls without them would be further programs. What does not fit either program is computed uncompiled: no request
waits for the compiler. MiniLM in bfloat16 on one thread takes 0.78, 0.89 and 0.96 times the CPU time then, for 1, 8 and
32 rows of 34 tokens.
"""

from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.probe import TOLERANCES
from trio_pool_serve.runner.progress import with_progress_bar

TRACED = ((2, 24), (1, 24))
"""(rows, tokens) of the two compiled programs: torch specialises on a size of one."""


@define(eq=False)
class CompiledBackbone:
    """``backbone``, compiled for rows of two and more tokens."""

    backbone: Backbone
    device: torch.device
    _of_ids: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        # With freezing, weights are packed for the CPU's kernels; this takes the memory of the weights a second time.
        options: dict[str, str | int | bool | Any] = {"freezing": self.device.type == "cpu"}
        self._of_ids = torch.compile(self.backbone.forward_ids, dynamic=True, options=options)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        embedded = any(request.prompt.embeds is not None for request in forward.requests)
        if embedded or forward.input_ids.shape[1] < 2:
            return self.backbone(forward)
        output: Tensor = self._of_ids(*forward.padded)
        return output

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile, and compare with the uncompiled backbone. Afterwards nothing is compiled in the whole process.

        Raises ``ValueError`` if its output differs, or the compiler's errors.
        """
        torch.compiler.set_stance("default")
        for rows, tokens in with_progress_bar(TRACED, "Compiling"):
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
        difference = float((ours - expected).norm() / expected.norm())
        if not difference <= TOLERANCES[next(self.backbone.model.parameters()).dtype]:
            raise ValueError(f"its compiled output differs by {difference:.2g} (relative)")
