"""The runner for transformers models."""

import numpy as np
import torch
from attrs import define, field
from torch import Tensor, nn

from trio_pool_serve.errors import RunnerDeadError
from trio_pool_serve.runner.copied_batch import CopiedBatch
from trio_pool_serve.runner.output_copy import OutputCopier, split_rows
from trio_pool_serve.runner.pooler import Pooler
from trio_pool_serve.types import Batch, PooledBatch, PoolingRequest, RenderedPrompt


@define(eq=False)
class TransformerRunner:
    """A model, its pooler, and one device.

    ``copier`` is ``None`` where the device computes synchronously.
    """

    model: nn.Module
    pooler: Pooler
    device: torch.device
    pad_token_id: int
    copier: OutputCopier | None = None
    dimensions: int = field(default=0, init=False)
    """Length of the vectors; known after ``warm_up``."""
    description: str = field(default="", init=False)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PooledBatch:
        """Enqueue the forward pass and the copy of its rows; on a processor, compute them.

        Raises ``RunnerDeadError`` once the CUDA context is lost.
        """
        try:
            rows, dimensions = self._cut_and_normalize(self._forward(batch), batch)
            if self.copier is None:
                return CopiedBatch(split_rows(rows, dimensions))
            return self.copier.start(rows, dimensions)
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise RunnerDeadError(f"the device failed: {error}") from error

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute one short batch and learn the vectors' length from it."""
        no_padding = int(self.pad_token_id == 0)  # the padding token may be the vocabulary's last
        token_ids = np.full(8, no_padding, dtype=np.int32)
        self.dimensions = self._forward(Batch((PoolingRequest(RenderedPrompt(token_ids)),))).shape[-1]

    def describe(self) -> str:
        """One line for people."""
        return self.description

    @property
    def default_batch_tokens(self) -> int:
        """Enough to fill a GPU; on a processor, about what it computes while a short query may wait."""
        return 2048 if self.device.type == "cpu" else 16384

    def _forward(self, batch: Batch) -> Tensor:
        """Return pooled rows [rows, d], float32, on the device."""
        input_ids, attention_mask, pooled_mask = self._assemble(batch)
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        rows: Tensor = self.pooler(states, pooled_mask)
        return rows

    def _assemble(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, attention mask (int64) and pooled positions (bool), each [rows, longest]."""
        shape = (len(batch.requests), batch.longest)
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        pooled = np.zeros(shape, dtype=np.bool_)
        for row, request in enumerate(batch.requests):
            prompt = request.prompt
            ids[row, : request.tokens] = prompt.token_ids
            mask[row, : request.tokens] = 1
            # An instruction that fills the whole input leaves nothing else to pool.
            skipped = prompt.instruction_tokens if prompt.instruction_tokens < request.tokens else 0
            pooled[row, skipped : request.tokens] = True
        return self._to_device(ids), self._to_device(mask), self._to_device(pooled)

    def _to_device(self, array: "np.ndarray[tuple[int, int], np.dtype[np.generic]]") -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _cut_and_normalize(self, rows: Tensor, batch: Batch) -> tuple[Tensor, list[int]]:
        """Return rows [rows, d], zero past each row's own dimensions and normalised where wanted."""
        params = [request.params for request in batch.requests]
        dimensions = [param.dimensions or self.dimensions for param in params]
        if any(length < self.dimensions for length in dimensions):
            kept = torch.tensor(dimensions).unsqueeze(1).to(self.device, non_blocking=True)
            rows = rows * (torch.arange(self.dimensions, device=self.device) < kept)
        wanted = [self.pooler.normalizes if param.normalize is None else param.normalize for param in params]
        if all(wanted):
            rows = nn.functional.normalize(rows, dim=-1)
        elif any(wanted):
            chosen = torch.tensor(wanted).unsqueeze(1).to(self.device, non_blocking=True)
            rows = torch.where(chosen, nn.functional.normalize(rows, dim=-1), rows)
        return rows, dimensions
