"""Loading and forward pass of vision-language embedding models."""

from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.vision_language import VisionLanguage
from trio_pool_serve.runner.forward_pass import ForwardPass, images_of, joined, require_placeholders
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.runner.transformer_masks import masks_of
from trio_pool_serve.types import Embed, ImageFeatures, TokenEmbed


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

    def output_of(self, forward: ForwardPass) -> Tensor:
        """Return the states, [rows, tokens, hidden]; the batch may mix rows with and without images.

        In a batch with images, rows of token embeddings are computed in a separate forward pass: given embeddings, the
        model finds placeholders by comparing with the placeholder's embedding, which any client could send.
        """
        requests = forward.requests
        if not images_of(requests):
            return super().output_of(forward)
        embedded = [row for row, request in enumerate(requests) if request.prompt.embeds is not None]
        if not embedded:
            return self._with_images(forward)
        others = [row for row, request in enumerate(requests) if request.prompt.embeds is None]
        parts = [super().output_of(forward.select(embedded)), self._with_images(forward.select(others))]
        longest = int(forward.lengths.max())
        padded = [nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
        return torch.cat(padded).index_select(0, to_device(np.argsort([*embedded, *others]), forward.device))

    def _with_images(self, forward: ForwardPass) -> Tensor:
        require_placeholders(forward.requests, self.image_token_id)
        encoded = encode_images(self.model.visual, images_of(forward.requests), forward.device)
        # transformers expects one part per image, and concatenates them.
        encoded.pooler_output = [encoded.pooler_output]
        if encoded.get("deepstack_features") is not None:
            encoded.deepstack_features = [[features] for features in encoded.deepstack_features]
        with masks_of(forward):
            states: Tensor = self.model(
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
        for row, request in enumerate(forward.requests):
            ids[row, : request.tokens] = request.prompt.token_ids
        grids = joined(images_of(forward.requests), "image_grid_thw")
        positions, _ = self.model.get_rope_index(
            torch.from_numpy(ids),
            torch.from_numpy((ids == self.image_token_id).astype(np.int64)),
            image_grid_thw=torch.from_numpy(grids),
            attention_mask=torch.from_numpy((np.arange(longest) < forward.lengths[:, None]).astype(np.int64)),
        )
        return to_device(positions.numpy(), forward.device)


def encode_images(visual: nn.Module, images: list[ImageFeatures], device: torch.device) -> Any:
    """Return the output of a vision tower for the patches of all images.

    Its ``pooler_output`` is [positions in the text, hidden].
    """
    tower: Any = visual
    grid = torch.from_numpy(joined(images, "image_grid_thw"))
    pixels = to_device(joined(images, "pixel_values"), device).to(tower.dtype)
    return tower(pixels, grid_thw=grid, return_dict=True, **_sizes(tower, grid, device))


def _sizes(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the arguments that the tower would compute from ``grid`` [images, 3]: time, height and width in patches.

    The bounds of images and windows stay on the host, where attention divides the patches by them.
    """
    merge = tower.spatial_merge_size
    on_device = {"position_ids": get_vision_position_ids(grid, merge)}
    on_host = {"cu_seqlens": get_vision_cu_seqlens(grid)}
    if hasattr(tower, "window_size"):  # Qwen2.5-VL
        on_device["window_index"], on_host["cu_window_seqlens"] = get_vision_window_index(
            grid, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
    if hasattr(tower, "num_grid_per_side"):  # Qwen3-VL
        on_device["interp_indices"], on_device["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return on_host | {name: to_device(tensor.numpy(), device) for name, tensor in on_device.items()}


def add_features(states: Tensor, is_image: Tensor, features: Tensor) -> Tensor:
    """Add ``features`` [positions, hidden] to the states [rows, tokens, hidden] of the images' tokens, in order.

    Equals the method of Qwen3-VL's text model, which waits for the device to find these tokens.
    """
    return states + torch.zeros_like(states).masked_scatter(is_image.unsqueeze(-1), features.to(states.dtype))
