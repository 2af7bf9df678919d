"""A text's token embeddings, sent in its place in every form and type, give the vectors of real models."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from attrs import frozen
from torch import Tensor

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import AskedFolder, farthest, one_of, serving_folder
from tests.models.model_families import TEXTS, reference, write_family
from tests.tensors import FORMS
from trio_pool_serve.config import InputConfig
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
FAMILIES = ("bert", "modernbert", "qwen3", "gemma3", "t5")
KEPT = [text for text in TEXTS if text]
TAKEN = InputConfig(enable_prompt_embeds=True)

SENT = [
    (form, dtype)
    for form in FORMS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if (form, dtype) != ("npy", torch.bfloat16)  # numpy has no such type
]


def payload(form: str, rows: Tensor) -> str:
    return base64.b64encode(FORMS[form](rows)).decode()


@frozen(eq=False)
class Rounded:
    """What the oracle has for KEPT, with its embeddings rounded to the type in which they are sent."""

    ids: Sequence[list[int]]
    rows: Sequence[Tensor]
    """Of each text, as its embedding layer makes them: dtype as sent, shape (tokens, hidden)."""
    expected: Vectors


def rounded(path: Path, dtype: torch.dtype) -> Rounded:
    theirs = reference(path)
    model = theirs[0].auto_model
    layer = model.get_input_embeddings()
    inputs = theirs.preprocess(KEPT)
    ids = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    with torch.no_grad():
        rows = [layer(row).to(dtype) for row in ids]
    for module in model.modules():
        if getattr(module, "weight", None) is layer.weight:  # T5 has two layers of the same numbers
            module.register_forward_hook(lambda _module, _inputs, made: made.to(dtype).float())
    return Rounded([row.tolist() for row in ids], rows, theirs.encode(KEPT))


async def vectors_of_embeds(ours: AskedFolder, payloads: Sequence[str] | str, **more: Any) -> Vectors:
    answer = await ours.post("/v1/embeddings", prompt_embeds=payloads, **more)
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


@pytest.mark.parametrize("name", one_of(FAMILIES, "bert"))
async def test_every_form_and_type_agrees(name: str, tmp_path: Path):
    path = write_family(tmp_path / name, name)
    by_dtype = {dtype: rounded(path, dtype) for _, dtype in SENT}
    differences: dict[str, float] = {}
    async with serving_folder(path, inputs=TAKEN) as ours:

        async def ask(form: str, dtype: torch.dtype) -> None:
            """All in one request, and the first by itself."""
            theirs = by_dtype[dtype]
            payloads = [payload(form, rows) for rows in theirs.rows]
            found = [*await vectors_of_embeds(ours, payloads), *await vectors_of_embeds(ours, payloads[0])]
            differences[f"{form} {dtype}"] = farthest(found, [*theirs.expected, theirs.expected[0]])

        async with trio.open_nursery() as clients:
            for form, dtype in SENT:
                clients.start_soon(ask, form, dtype)
        exact = by_dtype[torch.float32]
        of_ids = await ours.embeddings(exact.ids)
        of_embeds = await vectors_of_embeds(ours, [payload("npy", rows) for rows in exact.rows])
        await wait_idle(ours.service)
    assert len(differences) == len(SENT)
    assert max(differences.values()) < TOLERANCE, differences
    assert farthest(of_embeds, of_ids) < TOLERANCE
    for dtype in (torch.float16, torch.bfloat16):  # else the rounding would prove nothing
        assert farthest(by_dtype[dtype].expected, exact.expected) > TOLERANCE


async def test_embeddings_of_which_the_model_makes_no_numbers_are_refused(tmp_path: Path):
    """They are finite, but their squares are not."""
    path = write_family(tmp_path / "model", "bert")
    theirs = rounded(path, torch.float32)
    huge = torch.full_like(theirs.rows[0], 3e38)
    huge[:, ::2] *= -1
    async with serving_folder(path, inputs=TAKEN) as ours:
        answer = await ours.client.post("/v1/embeddings", json={"prompt_embeds": payload("npy", huge)})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt_embeds"
        assert "not finite" in answer.json()["error"]["message"]
        payloads = [payload("npy", rows) for rows in theirs.rows]
        assert farthest(await vectors_of_embeds(ours, payloads), theirs.expected) < TOLERANCE
        await wait_idle(ours.service)
