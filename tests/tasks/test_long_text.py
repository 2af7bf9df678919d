"""``--long-text chunk``: a text that is too long is embedded in windows."""

from collections import deque
from collections.abc import AsyncIterator

import attrs
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.conftest import assert_idle, running, wait_idle
from tests.model_folders import VOCABULARY, write_late_interaction_folder
from tests.scripted_runner import ScriptedRunner
from tests.tasks.scripted_jobs import embed, ids_of, read, words
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.long_text import MAX_WINDOWS
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.types import CopiedBatch

pytestmark = pytest.mark.unit

ROOM = 62
"""The model takes 64 tokens, two of them special."""


@pytest.fixture
async def service(scripted_folder, scripted: ScriptedRunner) -> AsyncIterator[Service]:
    config = Config(models=(str(scripted_folder),), loading=ModelConfig(long_text="chunk"))
    async with running(Service(config, lambda *_: scripted)) as ready:
        yield ready


def ids(first: int, last: int, before: str = "") -> list[int]:
    return ids_of(f"{before}{words(last - first, first)}")


async def test_a_text_that_fits_or_is_to_be_truncated_is_one_window(service, scripted):
    for text, params in ((words(ROOM), {}), (words(100), {"truncate_to": -1})):
        ((vector,),) = (await embed(service, text, **params)).rows
        assert vector[0] == ROOM + 2
    assert read(scripted) == [ids(0, ROOM)] * 2


async def test_a_longer_one_is_read_whole_each_token_once(service, scripted):
    answer = await embed(service, words(150))
    assert read(scripted) == sorted([ids(0, 62), ids(62, 124), ids(124, 150)])
    assert answer.prompt_tokens == 64 + 64 + 28
    assert_idle(service)


async def test_its_vector_is_the_mean_of_the_windows_weighed_by_their_tokens(service, scripted):
    ((vector,),) = (await embed(service, words(100))).rows
    first, second = np.array(ids(0, 62)), np.array(ids(62, 100))

    def scripted_vector(window):
        return np.array([len(window), window.sum(), window[0], window[-1], 0, 0, 0, 0])

    expected = (scripted_vector(first) * 64 + scripted_vector(second) * 40) / 104
    assert vector == pytest.approx(expected)
    assert vector.dtype == np.float32


async def test_unit_vectors_give_a_unit_vector(service, scripted):
    def unit(batch):
        angles = [float(request.prompt.token_ids[1]) for request in batch.requests]
        return CopiedBatch([(np.array([np.cos(a), np.sin(a)], dtype=np.float32),) for a in angles])

    scripted.on_launch = unit
    ((vector,),) = (await embed(service, words(100))).rows
    assert np.linalg.norm(vector) == pytest.approx(1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(1, -1, 0), (3e38, 3e38, 3e38), (3e38, -3e38, 0)],
    ids=["they cancel each other out", "large", "large and opposite"],
)
async def test_the_join_of_windows_is_a_number(service, scripted, first, second, expected):
    def vectors(batch):
        signs = [first if request.prompt.token_ids[1] == VOCABULARY["w0"] else second for request in batch.requests]
        return CopiedBatch([(np.array([sign], dtype=np.float32),) for sign in signs])

    scripted.on_launch = vectors
    ((vector,),) = (await embed(service, words(2 * ROOM))).rows
    assert vector == pytest.approx(np.array([expected], np.float32))
    assert vector.dtype == np.float32


async def test_the_instruction_stands_before_every_window(service, scripted):
    await embed(service, words(100), prompt_name="query")
    assert read(scripted) == sorted([ids(0, 60, "query : "), ids(60, 100, "query : ")])


async def test_an_instruction_that_leaves_no_room_is_refused(service):
    with pytest.raises(InvalidRequestError, match="no token of the text is left"):
        await embed(service, words(100), instruction="w1 " * 70)
    await wait_idle(service)


async def test_many_long_texts_keep_their_order(service):
    counts = [100, 5, 300, 62, 63]
    answer = await embed(service, *(words(count) for count in counts))
    alone = [(await embed(service, words(count))).rows[0][0] for count in counts]
    assert [vector.tolist() for (vector,) in answer.rows] == [vector.tolist() for vector in alone]


async def test_what_is_not_embedded_is_refused_as_ever(service):
    model = service.model()
    job = PoolJob(prompts=[TextPrompt(words(100))], tasks=("token_embed",))
    with pytest.raises(ContextLengthError):
        await pool(model, job, RequestContext())
    refusing = attrs.evolve(model, long_text=None)
    with pytest.raises(ContextLengthError):
        await pool(refusing, attrs.evolve(job, tasks=("embed",)), RequestContext())
    await wait_idle(service)


class CountingTokenizer(FastTokenizer):
    """Counts the characters that it tokenises."""

    characters = 0

    def encode(self, text, *, positions=False):
        type(self).characters += len(text)
        return super().encode(text, positions=positions)


async def test_a_text_of_more_windows_than_can_be_read_is_refused_and_hardly_more_tokens_are_made_of_it(
    service, scripted, scripted_folder
):
    """A text of 7 MB has two million tokens, 64 times what is read."""
    tokenizers = service.model().renderer.texts.tokenizers
    counting = CountingTokenizer(Backend.from_file(str(scripted_folder / "tokenizer.json")), frozenset())
    tokenizers._free = deque([counting] * len(tokenizers._free))
    for text in ("w1 " * (ROOM * MAX_WINDOWS + 1), "w1 w22 " * 2**20):
        CountingTokenizer.characters = 0
        with pytest.raises(ContextLengthError, match=f"the limit of {MAX_WINDOWS} windows"):
            await embed(service, text)
        assert 0 < CountingTokenizer.characters < 2**20
    assert scripted.batches == []
    await wait_idle(service)


async def test_a_model_that_embeds_no_windows_is_refused_with_the_setting(tmp_path):
    folder = write_late_interaction_folder(tmp_path / "tokens")
    config = Config(models=(f"m={folder}",), loading=ModelConfig(long_text="chunk"))
    with pytest.RaisesGroup(
        pytest.RaisesExc(ModelLoadError, match="m cannot be loaded: --long-text chunk"), flatten_subgroups=True
    ):
        async with running(Service(config, lambda *_: ScriptedRunner())):
            raise AssertionError("it has started")


async def test_beside_one_that_does_it_is_served_with_a_warning(scripted_folder, tmp_path, caplog):
    folder = write_late_interaction_folder(tmp_path / "tokens")
    config = Config(models=(str(scripted_folder), f"m={folder}"), loading=ModelConfig(long_text="chunk"))
    async with running(Service(config, lambda *_: ScriptedRunner())):
        assert "m: --long-text chunk: this model does not embed texts in windows" in caplog.text
