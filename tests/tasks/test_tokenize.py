"""Tokens for people to look at."""

import numpy as np
import pytest

from tests.conftest import assert_idle, full_queue
from tests.model_folders import VOCABULARY
from tests.tasks.scripted_jobs import CLS, SEP
from trio_pool_serve.errors import InvalidRequestError, OverloadedError
from trio_pool_serve.rendering.text.tokenizer import Token
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.tokenize import MAX_CHARACTERS, detokenize, tokenize

pytestmark = pytest.mark.unit


async def test_tokens_say_where_they_come_from(service):
    (tokens,) = await tokenize(service.model(), ["Hello  world"], RequestContext(), add_special_tokens=True)
    assert tokens == [
        Token(CLS, "[CLS]", True, None, None, "[CLS]"),
        Token(VOCABULARY["hello"], "Hello", False, 0, 5, "hello"),
        Token(VOCABULARY["world"], "world", False, 7, 12, "world"),
        Token(SEP, "[SEP]", True, None, None, "[SEP]"),
    ]
    assert_idle(service)


async def test_special_tokens_may_be_left_out_instructions_put_in_front_and_no_token_is_cut_off(service):
    model, context = service.model(), RequestContext()
    (tokens,) = await tokenize(model, ["hello"], context, add_special_tokens=False, instruction="query : ")
    assert [token.piece for token in tokens] == ["query", ":", "hello"]
    (tokens,) = await tokenize(model, ["hello " * 1000], context, add_special_tokens=True)
    assert len(tokens) == 1002


@pytest.mark.parametrize(
    ("text", "told"), [("\ud800", "Unicode"), ("w1 " * MAX_CHARACTERS, f"the limit is {MAX_CHARACTERS}")]
)
async def test_lone_surrogates_and_more_characters_than_can_be_looked_at_are_refused(service, text, told):
    with pytest.raises(InvalidRequestError, match=told):
        await tokenize(service.model(), [text], RequestContext(), add_special_tokens=True)
    assert_idle(service)


async def test_taking_apart_is_admitted_as_everything_is(service):
    with full_queue(service), pytest.raises(OverloadedError):
        await tokenize(service.model(), ["hello"], RequestContext(), add_special_tokens=True)
    with full_queue(service), pytest.raises(OverloadedError):
        await detokenize(service.model(), [np.array([5])], RequestContext(), skip_special_tokens=False)
    assert_idle(service)
