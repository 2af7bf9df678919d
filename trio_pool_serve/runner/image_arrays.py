"""The images of a batch as tensors."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trio_pool_serve.runner.transfers import to_device
from trio_pool_serve.types import ImageFeatures, PoolingRequest


def images_of(requests: Sequence[PoolingRequest]) -> list[ImageFeatures]:
    """Return the images of the requests that have any, in order."""
    return [request.prompt.images for request in requests if request.prompt.images is not None]


def require_placeholders(requests: Sequence[PoolingRequest], token_id: int) -> None:
    """Raise ``ValueError`` unless each row has a placeholder for each position of its images.

    A model that finds another number of them on a GPU ends the process instead.
    """
    for request in requests:
        prompt = request.prompt
        places = 0 if prompt.images is None else sum(prompt.images.tokens)
        if prompt.embeds is None and np.count_nonzero(prompt.token_ids == token_id) != places:
            raise ValueError(f"an input has not {places} placeholders for its images")


def image_inputs(
    images: Sequence[ImageFeatures], *, device: torch.device, dtype: torch.dtype, on_host: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the arrays of all images on the device, concatenated along their first dimension.

    Floating-point arrays (pixels) are converted to ``dtype``; the others (grids, masks) stay integers. Those named in
    ``on_host`` stay there: sizes that the model's code reads.
    """
    inputs = {}
    for name in images[0].arrays:
        array = joined(images, name)
        tensor = torch.from_numpy(array) if name in on_host else to_device(array, device)
        inputs[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return inputs


def joined(images: Sequence[ImageFeatures], name: str) -> npt.NDArray[Any]:
    """Return one array of all images, concatenated along its first dimension."""
    parts = [image.arrays[name] for image in images]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
