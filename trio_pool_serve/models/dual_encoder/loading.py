"""Loading and forward pass of dual encoders: a text tower and an image tower with one vector space."""

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.models.dual_encoder import DualEncoder
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_output_modules
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.forward_pass import ForwardPass, image_inputs, images_of
from trio_pool_serve.runner.heads.embedding import EmbeddingHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import Embed


def load_dual_encoder(folder: ModelFolder[DualEncoder], params: LoadingParams) -> LoadedModel:
    """Load a ``DualEncoder`` model."""
    return LoadedModel(
        backbone=TwoTowers(load_checkpoint(folder, params, optional_weights=())),
        heads={Embed: EmbeddingHead(load_output_modules(folder.spec.modules, params.device))},
        description="texts and images",
    )


@frozen(eq=False)
class TwoTowers(Backbone):
    """transformers' CLIP and SigLIP models."""

    def output_of(self, forward: ForwardPass) -> Tensor:
        """Return one vector per row, [rows, d]: of its text, or of its image if it has one."""
        texts = [row for row, request in enumerate(forward.requests) if request.prompt.images is None]
        images = [row for row, request in enumerate(forward.requests) if request.prompt.images is not None]
        parts = [self._of_texts(forward.select(texts))] if texts else []
        if images:
            arrays = image_inputs(images_of(forward.requests), device=forward.device, dtype=self.model.dtype)
            parts.append(self._vectors("get_image_features", **arrays))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts).index_select(0, to_device(np.argsort([*texts, *images]), forward.device))

    def _of_texts(self, forward: ForwardPass) -> Tensor:
        # Images may have more positions than the text tower.
        longest = max(request.tokens for request in forward.requests)
        return self._vectors(
            "get_text_features",
            input_ids=forward.input_ids[:, :longest],
            attention_mask=forward.attention_mask[:, :longest],
        )

    def _vectors(self, method: str, **inputs: Tensor) -> Tensor:
        vectors: Tensor = getattr(self.model, method)(**inputs).pooler_output
        return vectors
