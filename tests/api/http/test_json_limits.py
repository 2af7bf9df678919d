"""Bodies that are cheap to send and dear to parse are refused before they are parsed."""

import json

import pytest
from hypothesis import given, strategies

from trio_pool_serve.api.http.json_body import COUNTED_AT_ONCE, COUNTED_FROM, PER_INPUT, refuse_many_values
from trio_pool_serve.errors import InvalidRequestError

pytestmark = pytest.mark.unit

FEW = {"inputs": 10, "values": 1000}


def long(text: str) -> bytes:
    """The body with so much white space around it that it is counted."""
    return (text + " " * COUNTED_FROM).encode()


def is_refused(body: bytes, **most: int) -> bool:
    try:
        refuse_many_values(body, **(most or FEW))
    except InvalidRequestError:
        return True
    return False


def test_what_may_be_there_may_be_there():
    assert not is_refused(long(json.dumps(["a"] * 320)))
    assert not is_refused(long(json.dumps([[1]] * 319)))
    assert not is_refused(long(json.dumps([1] * 1001)))


@pytest.mark.parametrize("body", [["a"] * 321, [[1]] * 320, [{}] * 320, [1] * 1002])
def test_one_more_is_refused(body):
    with pytest.raises(InvalidRequestError, match=r"10 inputs\. Send fewer"):
        refuse_many_values(long(json.dumps(body)), **FEW)


def test_short_bodies_are_left_to_the_parser():
    assert not is_refused(json.dumps([[1]] * 10_000).encode())


@pytest.mark.parametrize("text", ["[" * 5000, "," * 5000, '"' * 5000, '\\"[' * 5000, "\\" * 5001, '\\\\"' * 999])
def test_what_is_within_a_text_does_not_count(text):
    assert not is_refused(long(json.dumps([text, "a"])))


@given(strategies.lists(strategies.text(alphabet='ab\\",[{}é', max_size=20), max_size=60), strategies.integers(0, 40))
def test_texts_are_counted_exactly_wherever_the_pieces_end(texts, shift):
    # The first text moves the others across the end of a piece.
    padding = "x" * (COUNTED_AT_ONCE - 2 - shift)
    body = json.dumps([padding, *texts, "[{" * 500], ensure_ascii=False).encode()
    count = len(texts) + 2
    assert not is_refused(body, inputs=count // PER_INPUT + 1)
    most = count // PER_INPUT * PER_INPUT
    assert is_refused(body, inputs=count // PER_INPUT) == (count > most or most < 1)
