"""Loading and forward pass of vision-language embedding models."""

from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.qwen_vision import add_features, encode_images
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.vision_language.spec import VisionLanguage
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.image_arrays import images_of, joined, require_placeholders
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.runner.transfers import to_device
from trio_pool_serve.runner.transformer_masks import masks_of
from trio_pool_serve.types import Embed, TokenEmbed


def load_vision_language(folder: ModelFolder[VisionLanguage], params: LoadingParams) -> LoadedModel:
    """Load a ``VisionLanguage`` model. Token embeddings are the transformer's states, before pooling."""
    spec = folder.spec
    pooler = load_pooler(spec.modules, params.device)
    model: Any = load_checkpoint(folder, params, optional_weights=())
    if hasattr(model.language_model, "_deepstack_process"):
        model.language_model._deepstack_process = add_features  # noqa: SLF001
    return LoadedModel(
        backbone=QwenVision(model, image_token_id=spec.patches.token_id),
        heads={Embed: EmbeddingHead(pooler), TokenEmbed: TokenEmbeddingHead(nn.Identity(), normalizes=False)},
        description=f"texts with images, {'+'.join(pooler.pooling)} pooling",
    )


@frozen(eq=False)
class QwenVision(Backbone):
    """transformers' Qwen-VL models without their language model head."""

    image_token_id: int = field(kw_only=True)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the states, [rows, tokens, hidden]; the batch may mix rows with and without images.

        In a batch with images, rows of token embeddings are computed in a separate forward pass: given embeddings, the
        model finds placeholders by comparing with the placeholder's embedding, which any client could send.
        """
        requests = forward.requests
        if not images_of(requests):
            return super().__call__(forward)
        embedded = [row for row, request in enumerate(requests) if request.prompt.embeds is not None]
        if not embedded:
            return self._with_images(forward)
        others = [row for row, request in enumerate(requests) if request.prompt.embeds is None]
        parts = [super().__call__(forward.select(embedded)), self._with_images(forward.select(others))]
        longest = int(forward.lengths.max())
        padded = [nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
        return torch.cat(padded).index_select(0, to_device(np.argsort([*embedded, *others]), forward.device))

    def _with_images(self, forward: ForwardPass) -> Tensor:
        model: Any = self.model
        require_placeholders(forward.requests, self.image_token_id)
        encoded = encode_images(model.visual, images_of(forward.requests), forward.device)
        # transformers expects one part per image, and concatenates them.
        encoded.pooler_output = [encoded.pooler_output]
        if encoded.get("deepstack_features") is not None:
            encoded.deepstack_features = [[features] for features in encoded.deepstack_features]
        with masks_of(forward):
            states: Tensor = model(
                input_ids=forward.input_ids,
                attention_mask=forward.attention_mask,
                position_ids=self._positions(forward),
                mm_encoder_outputs={"image": encoded},
            ).last_hidden_state
        return states

    def _positions(self, forward: ForwardPass) -> Tensor:
        """Return the positions in time, height and width, [3, rows, tokens].

        Computed by the model's own method, on the host: it iterates over ids and grids, and on the device each step
        would wait for a copy. Passing positions also keeps the model from storing them as state.
        """
        rows, longest = len(forward.requests), int(forward.lengths.max())
        ids = np.zeros((rows, longest), dtype=np.int64)
        attended = np.zeros((rows, longest), dtype=np.int64)
        for row, request in enumerate(forward.requests):
            ids[row, : request.tokens] = request.prompt.token_ids
            attended[row, : request.tokens] = 1
        grids = joined(images_of(forward.requests), "image_grid_thw")
        model: Any = self.model
        positions, _ = model.get_rope_index(
            torch.from_numpy(ids),
            torch.from_numpy((ids == self.image_token_id).astype(np.int64)),
            image_grid_thw=torch.from_numpy(grids),
            attention_mask=torch.from_numpy(attended),
        )
        return to_device(positions.numpy(), forward.device)
