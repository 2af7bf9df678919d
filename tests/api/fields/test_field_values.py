"""Values that are given under several names, or beside fields that leave them nothing to do."""

import attrs
import pytest

from tests.api.scripted_models import PROMPTS, Able, become, ids_of
from tests.api.serving import post, refused
from tests.conftest import assert_idle
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from trio_pool_serve.api.fields.field_values import the_same

EMBED = {"input": "hello"}


INPUT_TYPES = [
    ("/v2/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_query"]),
    ("/v1/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_document"]),
    ("/v1/embeddings", EMBED, "task", ["retrieval.query", "text-matching", "separation", "code.passage", "qa.query"]),
    ("/v1/embeddings", EMBED, "input_type", ["query", "document", "passage", "clustering"]),
    ("/pooling", {**EMBED, "task": "embed"}, "input_type", ["query", "document"]),
    ("/v1/multimodalembeddings", {"inputs": [{"content": "hello"}]}, "input_type", ["query", "document"]),
]


SIDES = {
    **dict.fromkeys(["search_query", "retrieval.query"], "query : hello"),
    **dict.fromkeys(["search_document", "passage", "retrieval.passage"], "passage : hello"),
}


def read_last(scripted: ScriptedRunner) -> list[int]:
    return scripted.batches[-1].requests[0].prompt.token_ids.tolist()


@each(("path", "body", "param", "known"), INPUT_TYPES)
async def test_texts_get_the_model_s_prompt_of_that_name_or_for_that_side(
    client, service, scripted, path, body, param, known
):
    become(service, Able())
    for name in {*known, *PROMPTS, None} - {"image"}:  # texts are none
        await post(client, path, **body, **{param: name})
        assert read_last(scripted) == ids_of(SIDES.get(name, f"{PROMPTS.get(name, '')}hello")), name


@each(("path", "body", "param", "known"), INPUT_TYPES)
async def test_an_unknown_input_type_is_refused_with_all_that_are_known(client, service, path, body, param, known):
    become(service, Able())
    for unknown in ("nonsense", "retrieval.foo", ""):
        error = await refused(client, path, {**body, param: unknown, "prompt_name": None})
        assert error["param"] == param
        assert error["message"].startswith(f"{param} must be one of ")
        assert error["message"].endswith(f", not '{unknown}'.")
        assert all(name in error["message"] for name in (*known, *PROMPTS))


async def test_a_refusal_repeats_the_beginning_of_a_long_text_only(client, service):
    become(service, Able())
    fields = [(path, body, param, 2000) for path, body, param, _ in INPUT_TYPES]
    fields += [("/embed", {"inputs": "hello"}, name, 2000) for name in ("model", "prompt_name", "truncation_direction")]
    fields += [("/v1/embeddings", EMBED, name, 2500) for name in ("model", "prompt_name", "encoding_format", "prompt")]
    for path, body, param, most in fields:
        answer = await client.post(path, json={**body, param: "x" * 2**21})
        assert answer.status_code in (400, 404, 422)
        assert len(answer.content) < most, (path, param)
    await post(client, **EMBED)
    assert_idle(service)


@attrs.frozen
class Named:
    here: int = 1


@pytest.mark.unit
def test_a_name_that_a_request_does_not_have_is_no_name_of_anything():
    assert the_same(Named(), "here") == 1
    with pytest.raises(AttributeError, match="hree"):
        the_same(Named(), "here", "hree")
