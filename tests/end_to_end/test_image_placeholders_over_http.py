"""A placeholder that no image is for is refused by name, and the inputs beside it in the queue are answered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
import trio

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import AskedFolder, farthest, one_of, serving_folder
from tests.end_to_end.seen_contents import as_url
from tests.models.vision_families import PAGE_RETRIEVERS, PICTURES, VISION_LANGUAGE, write_qwen
from trio_pool_serve.models.folder import read_model_folder

TOLERANCE = 1e-5
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NO_IMAGE = "a placeholder for an image, but no image"
GOOD = ["a photo of two cats on a couch", {"image": as_url(PICTURES[0])}, "yes", {"image": as_url(PICTURES[4])}]


def placeholder_of(path: Path) -> tuple[str, int]:
    """Its name and its id."""
    folder = read_model_folder(path)
    images: Any = folder.image_format()
    return transformers.AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(images.token_id), images.token_id


async def answers_beside(ours: AskedFolder, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Ask each body of /pooling while others ask for GOOD, whose answers must be what they are alone."""
    alone = await ours.pooled(GOOD)
    answers: dict[int, httpx.Response] = {}

    async def refused(index: int, body: dict[str, Any]) -> None:
        answers[index] = await ours.client.post("/pooling", json=body)

    async def good() -> None:
        assert farthest(await ours.pooled(GOOD), alone) < TOLERANCE

    async with trio.open_nursery() as clients:
        for index, body in enumerate(bodies):
            clients.start_soon(refused, index, body)
            clients.start_soon(good)
    await wait_idle(ours.service)
    await good()
    return [answers[index] for index in range(len(bodies))]


@pytest.mark.parametrize("name", one_of([*QWEN, "colqwen2", "colpali"], "qwen3_vl", "colpali"))
async def test_a_placeholder_without_an_image_is_400_and_its_neighbours_are_answered(name: str, tmp_path: Path):
    path = {**VISION_LANGUAGE, **PAGE_RETRIEVERS}[name](tmp_path / name)
    written, token_id = placeholder_of(path)
    text = f"what is {written} here"
    async with serving_folder(path) as ours:
        answers = await answers_beside(
            ours,
            [
                {"input": text},
                {"input": ["hello", text]},
                {"input": [50, token_id, 60]},
                {"input": [[50, 60], [token_id]]},
                {"input": [{"image": as_url(PICTURES[0])}, {"text": text}]},
                {"input": text, "truncate_prompt_tokens": -1, "input_type": "query"},
            ],
        )
        score = await ours.client.post("/score", json={"text_1": "hello", "text_2": ["hello", text]})
        if name in QWEN:  # no video is read: a placeholder for one is a token like others
            assert len(await ours.pooled(["what is <|video_pad|> here"])) == 1
        await wait_idle(ours.service)
    for answer in (*answers, score):
        assert answer.status_code == 400, answer.text
        assert NO_IMAGE in answer.json()["error"]["message"]


async def test_a_placeholder_far_behind_in_a_long_text_is_refused(tmp_path: Path):
    """A model without a chat template reads long texts in windows."""
    path = write_qwen(tmp_path / "bare", "qwen2_vl")
    (path / "chat_template.jinja").unlink()
    written, _ = placeholder_of(path)
    text = "hello " * 2000 + written
    async with serving_folder(path, max_model_len=64, long_text="chunk") as ours:
        assert not ours.service.models.find().loaded.folder.spec.uses_chat_template
        assert len(await ours.embeddings(["hello " * 2000])) == 1
        answer = await ours.client.post("/v1/embeddings", json={"input": ["hello", text]})
        assert answer.status_code == 400, answer.text
        assert NO_IMAGE in answer.json()["error"]["message"]
        await wait_idle(ours.service)
