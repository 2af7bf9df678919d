"""Token embeddings that are sent to a real model in the place of a text."""

import base64
from pathlib import Path

import numpy as np
import torch

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import farthest, serving_folder
from tests.models.model_families import TEXTS, reference, write_family
from tests.tensors import FORMS
from trio_pool_serve.config import InputConfig

TOLERANCE = 1e-5


async def test_a_text_s_embeddings_give_its_vector_and_those_of_which_the_model_makes_no_numbers_are_refused(
    tmp_path: Path,
):
    """They are finite, but their squares are not."""
    path = write_family(tmp_path / "model", "bert")
    theirs, texts = reference(path), [text for text in TEXTS if text]
    layer, tokenizer = theirs[0].auto_model.get_input_embeddings(), theirs.tokenizer
    rows = [layer(torch.tensor(tokenizer(text, truncation=True)["input_ids"])).detach() for text in texts]
    huge = torch.full_like(rows[0], 3e38)
    huge[:, ::2] *= -1
    payloads = [base64.b64encode(FORMS["npy"](each)).decode() for each in (*rows, huge)]
    async with serving_folder(path, inputs=InputConfig(enable_prompt_embeds=True)) as ours:
        answer = await ours.client.post("/v1/embeddings", json={"prompt_embeds": payloads[-1]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt_embeds"
        assert "not finite" in answer.json()["error"]["message"]
        found = (await ours.post("/v1/embeddings", prompt_embeds=payloads[:-1]))["data"]
        assert farthest([np.array(item["embedding"]) for item in found], theirs.encode(texts)) < TOLERANCE
        await wait_idle(ours.service)
