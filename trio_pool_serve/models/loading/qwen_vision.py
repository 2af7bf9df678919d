"""The vision towers of Qwen's models, given on the host what their code would otherwise read from the device."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from trio_pool_serve.runner.image_arrays import joined
from trio_pool_serve.runner.transfers import to_device
from trio_pool_serve.types import ImageFeatures


def encode_images(visual: nn.Module, images: list[ImageFeatures], device: torch.device) -> Any:
    """Return the output of a vision tower for the patches of all images, by images' ``image_grid_thw``.

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

    As Qwen3-VL's text model does, without finding out on the host which tokens those are.
    """
    spread = torch.zeros_like(states).masked_scatter(is_image.unsqueeze(-1), features.to(states.dtype))
    return states + spread
