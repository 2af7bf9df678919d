"""Images among inputs."""

from collections.abc import Sequence

from trio_pool_serve.api.fields.limits import require_few
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, field_of
from trio_pool_serve.prompts import ContentPrompt, ImagePart, Prompt

LONGEST_SCHEME = 32


def image_part(image: str, *, place: str) -> ImagePart:
    """Return the part for a URL of an image, or for its bytes in bare base64. Raises ``EmptyInputError``."""
    if not image:
        raise EmptyInputError("An image is empty.", param=field_of(place))
    return ImagePart(image if ":" in image[:LONGEST_SCHEME] else f"data:;base64,{image}", place)


def image_prompts(given: str | Sequence[object], network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Return a prompt for each of several images, or for one; ``param`` is the field that they are in.

    Raises ``InvalidRequestError`` for anything but strings, and for too many.
    """
    images = [given] if isinstance(given, str) else given
    if not images:
        raise EmptyInputError(f"{param} is empty.", param=param)
    require_few(images, network, param=param)
    prompts: list[Prompt] = []
    for index, image in enumerate(images):
        if not isinstance(image, str):
            raise InvalidRequestError("Images are given as URLs, or as their bytes in base64.", param=param)
        place = param if images is not given else f"{param}[{index}]"
        prompts.append(ContentPrompt((image_part(image, place=place),)))
    return prompts
