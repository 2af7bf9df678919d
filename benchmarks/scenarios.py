"""Loads that keep a server busy while ``/health`` is requested."""

import io
import json
from typing import Any

import numpy as np
import pybase64
from attrs import frozen
from PIL import Image

from benchmarks.made_models import EMBEDS, HIDDEN, IMAGES
from benchmarks.model import MODEL_NAME, Texts

TOKENS = 34

LARGE_TEXT_BYTES = 10**6

IMAGE_SIZE = (1024, 1024)

IMAGE_CLIENTS = 16

EMBEDS_ROWS = 2048

SLOW_TEMPLATE = (
    "{% for i in range(99999) %}{% set _ = i * i %}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
"""A hundred thousand turns of a loop before the first character."""

FLAGS = (
    "--enable-prompt-embeds",
    "--trust-request-chat-template",
    "--max-body-bytes=67108864",
    "--plugins=benchmarks.no_image_cache",  # every image is a new one
)
"""The flags that the servers need for these requests."""


@frozen
class Scenario:
    """A load of some clients; an idle server with none."""

    name: str
    bodies: list[str]
    clients: int


def scenarios() -> list[Scenario]:
    """Return everything the loop is put through."""
    texts = Texts().make(1024, TOKENS)
    large = " ".join(texts * (1 + LARGE_TEXT_BYTES // len(" ".join(texts))))[:LARGE_TEXT_BYTES]
    talk = [{"role": "user", "content": texts[0]}]
    return [
        Scenario("idle", [], 0),
        Scenario("32 text clients", [body_of(MODEL_NAME, input=text) for text in texts], 32),
        Scenario("1024 texts a request", [body_of(MODEL_NAME, input=texts)], 1),
        Scenario("a text of 1 MB", [body_of(MODEL_NAME, input=large, truncate_prompt_tokens=-1)], 1),
        Scenario(
            "16 image clients, 1 megapixel",
            [body_of(IMAGES, input=[jpeg_url(seed)], modality="image") for seed in range(IMAGE_CLIENTS)],
            IMAGE_CLIENTS,
        ),
        Scenario(f"prompt_embeds, {EMBEDS_ROWS} × {HIDDEN} bfloat16", [_embeds_body()], 1),
        Scenario("a slow chat template", [body_of(EMBEDS, messages=talk, chat_template=SLOW_TEMPLATE)], 1),
    ]


def body_of(model: str, **fields: Any) -> str:
    """Return the body of a request for vectors in base64."""
    return json.dumps({"model": model, "encoding_format": "base64", **fields})


def jpeg_url(seed: int, size: tuple[int, int] = IMAGE_SIZE) -> str:
    """Return a ``data:`` URL of ``jpeg``."""
    return f"data:image/jpeg;base64,{pybase64.b64encode(jpeg(seed, size)).decode()}"


def jpeg(seed: int, size: tuple[int, int] = IMAGE_SIZE) -> bytes:
    """Return a photograph's worth of a JPEG: a coarse random picture, enlarged, with grain."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.integers(-12, 13, smooth.shape, dtype=np.int16)
    encoded = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def _embeds_body() -> str:
    import torch
    from safetensors.torch import save

    torch.manual_seed(0)
    serialised = save({"embeds": torch.randn(EMBEDS_ROWS, HIDDEN).bfloat16()})
    return body_of(EMBEDS, prompt_embeds=pybase64.b64encode(serialised).decode())
