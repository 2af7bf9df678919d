"""Serialised matrices to numbers: every form in every type, and nothing that only looks like one."""

import base64
import gc
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from tests.model_folders import numpy_file
from tests.tensors import FORMS, MAX_ROWS, ROWS, WIDTH, as_npy
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import EmbedsPrompt, RenderingParams
from trio_pool_serve.rendering.prompt_embeds import DECODE_CHUNK_CHARACTERS, EmbedsFormat
from trio_pool_serve.runner.forward_pass import to_device
from trio_pool_serve.types import RenderedPrompt

FORMAT = EmbedsFormat(WIDTH, MAX_ROWS)


def render(stored: bytes, embeds_format: EmbedsFormat = FORMAT, **params) -> RenderedPrompt:
    return embeds_format.render(EmbedsPrompt(base64.b64encode(stored)), RenderingParams(**params))


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMS_AND_TYPES = [pair for pair in itertools.product(FORMS, DTYPES) if pair != ("npy", torch.bfloat16)]
each_form_and_type = pytest.mark.parametrize(("form", "dtype"), FORMS_AND_TYPES)


@each_form_and_type
def test_every_form_holds_every_type_that_it_has_exactly(form, dtype):
    """In no more bytes than there are in the tensor."""
    rows = ROWS.to(dtype)
    rendered = render(FORMS[form](rows))
    assert torch.equal(to_device(rendered.embeds, torch.device("cpu")), rows)
    assert rendered.embeds.nbytes == rows.nbytes
    assert rendered.token_ids.tolist() == [0] * len(rows)


class Garbage:
    """What the collector finds, and runs Python for: then it can switch threads."""

    def __init__(self):
        self.cycle = self

    def __del__(self):
        self.cycle = None


@pytest.fixture
def keen_collector():
    """Collect garbage and switch threads as often as can be."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20, 5, 1000)
    sys.setswitchinterval(1e-5)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("keen_collector")
def test_threads_read_headers_whenever_the_collector_comes():
    stored = as_npy(ROWS)

    def read(_: int) -> None:
        Garbage()
        assert render(stored).embeds.shape == ROWS.shape

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(read, range(10_000)))) == 10_000


def test_columns_first_is_read_as_numpy_reads_it():
    assert np.array_equal(render(numpy_file(np.asfortranarray(ROWS.numpy()))).embeds, ROWS.numpy())


def test_a_tensor_of_many_pieces_is_whole():
    rows = torch.randn(DECODE_CHUNK_CHARACTERS // 1024, 1024)
    assert np.array_equal(render(as_npy(rows), EmbedsFormat(1024, len(rows))).embeds, rows.numpy())


@each_form_and_type
def test_a_payload_is_taken_for_no_fewer_rows_than_it_has(form, dtype):
    wide = EmbedsFormat(1024, 512)
    for count in (1, 2, 3, 40, 500):
        stored = FORMS[form](torch.zeros(count, wide.width, dtype=dtype))
        most = wide.estimated_tokens(EmbedsPrompt(base64.b64encode(stored)))
        assert count <= most <= min(count * dtype.itemsize // 2 + 1, wide.max_rows)  # the header is less than a row


def test_rows_are_cut_off_as_tokens_are():
    rows = torch.randn(MAX_ROWS + 9, WIDTH)
    stored = as_npy(rows)
    assert np.array_equal(render(stored, truncate_to=3).embeds, rows[:3].numpy())
    assert np.array_equal(render(stored, truncate_to=3, truncation_side="left").embeds, rows[-3:].numpy())
    assert np.array_equal(render(stored, truncate_to=MAX_ROWS).embeds, rows[:MAX_ROWS].numpy())
    assert np.array_equal(render(as_npy(ROWS), truncate_to=MAX_ROWS).embeds, ROWS.numpy())
    with pytest.raises(ContextLengthError):
        render(stored)


GOOD = base64.b64encode(as_npy(ROWS))
NOT_GOOD = [GOOD[:-1], GOOD[:-4], GOOD + b"AAA", b"\n" + GOOD, b"\xff" * 8, b"=", b"===="]
NOT_GOOD += [GOOD[:100] + inside + GOOD[100 + len(inside) :] for inside in (b" ", b"====", b"-_")]

LARGE = base64.b64encode(as_npy(torch.zeros(512, 1024)))
PADDED = LARGE[: DECODE_CHUNK_CHARACTERS - 4] + b"AA==" + LARGE[DECODE_CHUNK_CHARACTERS:]
"""With padding between two pieces that are decoded by themselves."""


@pytest.mark.parametrize(
    "payload", [*NOT_GOOD, GOOD[:100] + b" " + GOOD[100:], PADDED], ids=lambda each: each[:8].hex()
)
def test_base64_is_strict(payload):
    embeds_format = EmbedsFormat(1024, 4096) if payload is PADDED else FORMAT
    with pytest.raises(InvalidRequestError):
        embeds_format.render(EmbedsPrompt(payload), RenderingParams())


@pytest.mark.parametrize("form", FORMS)
@given(data=strategies.data())
def test_a_file_with_any_byte_changed_gives_a_matrix_or_its_error(form, data):
    stored = bytearray(FORMS[form](ROWS))
    place = data.draw(strategies.integers(0, len(stored) - 1))
    stored[place] = data.draw(strategies.integers(0, 255))
    try:
        rendered = render(bytes(stored))
    except InvalidRequestError:
        return
    assert rendered.embeds.shape[1] == WIDTH
    assert to_device(rendered.embeds, torch.device("cpu")).isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@given(end=strategies.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(form, end):
    stored = FORMS[form](ROWS)
    with pytest.raises(InvalidRequestError):
        render(stored[: end % len(stored)])
