"""Texts and images, as the clients of each dialect send them."""

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from tests.end_to_end.folder_over_http import AskedFolder, in_order
from tests.models.vision_families import Content
from tests.rendering.media.images import data_url
from trio_pool_serve.types import Vectors


def as_png(image: Image.Image) -> bytes:
    """A form that loses nothing."""
    written = BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def as_url(image: Image.Image) -> str:
    return data_url(as_png(image))


def as_base64(image: Image.Image) -> str:
    return base64.b64encode(as_png(image)).decode()


# -- one input ------------------------------------------------------------------------------------------


def parts(content: Content) -> list[dict[str, Any]]:
    """OpenAI's and Cohere's: the URL in an object."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": as_url(part)}}
        for part in content
    ]


def _voyage_parts(content: Content) -> list[dict[str, Any]]:
    """The URL as it is, the base64 every other time."""
    images = (
        lambda image: {"type": "image_url", "image_url": as_url(image)},
        lambda image: {"type": "image_base64", "image_base64": as_url(image)},
    )
    return [
        {"type": "text", "text": part} if isinstance(part, str) else images[place % 2](part)
        for place, part in enumerate(content)
    ]


def _jina_input(content: Content) -> Any:
    """A text as it is, an image, or a text before an image."""
    match content:
        case [str(text)]:
            return text
        case [Image.Image() as image]:
            return {"image": as_base64(image)}
        case [str(text), Image.Image() as image]:
            return {"text": text, "image": as_url(image)}
    raise AssertionError(content)


def goes_into_an_object(content: Content) -> bool:
    """Whether Jina's inputs can hold it."""
    return len(content) == 1 or (len(content) == 2 and isinstance(content[0], str))


# -- requests -------------------------------------------------------------------------------------------


async def jina(ours: AskedFolder, contents: Sequence[Content]) -> Vectors:
    return await ours.embeddings([_jina_input(content) for content in contents], truncate=True)


async def pooling(ours: AskedFolder, contents: Sequence[Content]) -> Vectors:
    return np.array(await ours.pooled([_jina_input(content) for content in contents], task="embed"))


async def _cohere(ours: AskedFolder, path: str, **asked: Any) -> Vectors:
    answer = await ours.post(path, **asked, embedding_types=["float"])
    return np.array(answer["embeddings"]["float"], dtype=np.float32)


async def cohere_v1(ours: AskedFolder, contents: Sequence[Content]) -> Vectors:
    return await _cohere(ours, "/v1/embed", inputs=[{"content": parts(content)} for content in contents])


async def cohere_v2(ours: AskedFolder, contents: Sequence[Content]) -> Vectors:
    return await _cohere(ours, "/v2/embed", inputs=[{"content": parts(content)} for content in contents])


async def voyage(ours: AskedFolder, contents: Sequence[Content]) -> Vectors:
    inputs = [{"content": _voyage_parts(content)} for content in contents]
    answer = await ours.post("/v1/multimodalembeddings", inputs=inputs)
    return np.array([item["embedding"] for item in in_order(answer["data"])], dtype=np.float32)


async def infinity(ours: AskedFolder, images: Sequence[Image.Image]) -> Vectors:
    return await ours.embeddings([as_url(image) for image in images], modality="image")


async def cohere_v1_images(ours: AskedFolder, images: Sequence[Image.Image]) -> Vectors:
    return await _cohere(ours, "/v1/embed", images=[as_url(image) for image in images], input_type="image")


async def cohere_v2_images(ours: AskedFolder, images: Sequence[Image.Image]) -> Vectors:
    return await _cohere(ours, "/v2/embed", images=[as_url(image) for image in images], input_type="image")


OF_OBJECTS: Mapping[str, Callable[[AskedFolder, Sequence[Content]], Awaitable[Vectors]]] = {
    request.__name__: request for request in (jina, pooling)
}
"""Requests for inputs that ``goes_into_an_object`` is true of."""

OF_PARTS: Mapping[str, Callable[[AskedFolder, Sequence[Content]], Awaitable[Vectors]]] = {
    request.__name__: request for request in (cohere_v1, cohere_v2, voyage)
}
"""Requests for inputs of any texts and images."""

OF_IMAGES: Mapping[str, Callable[[AskedFolder, Sequence[Image.Image]], Awaitable[Vectors]]] = {
    request.__name__: request for request in (infinity, cohere_v1_images, cohere_v2_images)
}
"""Requests for images alone."""
