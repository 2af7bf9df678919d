"""The embed task: what a job may ask, and what comes of it."""

import attrs
import numpy as np
import pytest
import trio

from tests.api.scripted_models import LateInteraction, serve_as
from tests.conftest import assert_idle, running
from tests.model_folders import write_json, write_scripted_folder
from tests.tasks.scripted_jobs import embed, ids_of, rows_of, words
from trio_pool_serve.config import Config
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError, OverloadedError
from trio_pool_serve.prompts import ChunkedPrompt, PairPrompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.fan_out import RowToCompute, compute_rows
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, estimated_work, pool, rows_to_compute
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Client, Embed

pytestmark = pytest.mark.unit


class Chunkable(LateInteraction):
    """Takes means, too."""

    tasks = frozenset({"embed"})
    pools_chunks = True


def last_row(scripted) -> list[int]:
    return rows_of(scripted)[-1].prompt.token_ids.tolist()


async def test_token_ids_are_embedded_as_they_are(service, scripted):
    answer = await embed(service, TokensPrompt(np.array([9, 8, 7])), prompt_name="query")
    assert (last_row(scripted), answer.prompt_tokens) == ([9, 8, 7], 3)


# -- equal inputs -------------------------------------------------------------------------------------


async def test_equal_texts_are_computed_once_and_each_counts(service, scripted):
    texts, done = ["hello", "w1 w2", "hello", *map(words, range(3, 40)), "w1 w2", "hello"], dict[int, float]()
    job = PoolJob(prompts=[*map(TextPrompt, texts)])
    answer = await pool(service.model(), job, RequestContext(), lambda index, row: done.update({index: row[0][1]}))
    assert len(rows_of(scripted)) == len({*texts})
    expected = [float(sum(ids_of(text))) for text in texts]
    assert [vector[1] for (vector,) in answer.rows] == [done[index] for index in range(len(texts))] == expected
    assert answer.tokens == [len(ids_of(text)) for text in texts]
    assert_idle(service)


async def test_an_error_names_the_first_of_equal_texts(service):
    with pytest.raises(ContextLengthError) as caught:
        await embed(service, "hello", "hello", words(90), words(90))
    assert caught.value.place.index == 2
    assert_idle(service)


async def test_texts_and_pairs_of_other_params_are_rows_of_their_own(service, scripted):
    params, other = (Embed(),), (Embed(dimensions=2),)
    plain, cut = RenderingParams(), RenderingParams(truncate_to=3)
    rows = [
        RowToCompute(prompt, rendering, params_of, in_windows)
        for prompt in (TextPrompt("w1 w2"), PairPrompt("w1", "w2"), PairPrompt("w1", "w2", max_first_tokens=5))
        for rendering in (plain, cut)
        for params_of in (params, other)
        for in_windows in (False, True)
    ]
    model, timings = service.model(), RequestTimings()
    with model.admit(RequestContext().work(1, 2 * len(rows))) as admitted:
        computed = await compute_rows(model, rows * 2, admitted, timings)
    assert timings.rows == len(rows)
    assert [row.values[0] for row in computed[: len(rows)]] == [row.values[0] for row in computed[len(rows) :]]


# -- instructions -------------------------------------------------------------------------------------


async def test_a_model_without_instructions_says_so(tmp_path, scripted):
    folder = write_scripted_folder(tmp_path / "model")
    (folder / "config_sentence_transformers.json").unlink()
    async with running(Service(Config(models=(str(folder),)), lambda *_: scripted)) as service:
        with pytest.raises(InvalidRequestError, match="its prompts: none"):
            await embed(service, "hello", prompt_name="passage")
        for params in ({}, {"prompt_name": "query"}):  # as in sentence-transformers, which has it empty then
            await embed(service, "hello", **params)
            assert last_row(scripted) == ids_of("hello")


async def test_the_default_prompt_name_holds_for_those_who_name_none(tmp_path, scripted):
    folder = write_scripted_folder(tmp_path / "model")
    prompts = {"query": "query : ", "passage": "passage : ", "": ""}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "passage"})
    async with running(Service(Config(models=(str(folder),)), lambda *_: scripted)) as service:
        for params, expected in (
            ({}, "passage : hello"),
            ({"prompt_name": "query"}, "query : hello"),
            ({"instruction": ""}, "hello"),
            ({"prompt_name": ""}, "hello"),
        ):
            await embed(service, "hello", **params)
            assert last_row(scripted) == ids_of(expected), params


# -- truncation ---------------------------------------------------------------------------------------


async def test_long_inputs_are_truncated_by_default_if_the_server_is_set_so(service):
    service.models.find().loaded = attrs.evolve(service.models.find().loaded, long_text="truncate")
    assert (await embed(service, words(150))).prompt_tokens == 64
    assert (await embed(service, words(150), truncate_to=4)).prompt_tokens == 4
    with pytest.raises(ContextLengthError):
        await embed(service, words(150), refuses_longer=True)


# -- vectors ------------------------------------------------------------------------------------------


# -- admission ----------------------------------------------------------------------------------------


async def test_no_text_is_admitted_for_more_than_it_can_cost(service):
    model = service.model()
    job = PoolJob(prompts=[TextPrompt("x" * 1_000_000)], input_params=InputParams(truncate_to=-1))
    work = estimated_work(model, job, rows_to_compute(model, job), RequestContext())
    assert (work.tokens, work.rows, work.has_images) == (model.renderer.max_model_len, 1, False)


async def test_a_job_is_admitted_for_as_long_as_it_takes_and_for_what_it_is_once_that_is_known(service, scripted):
    scripted.gate.clear()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            await embed(service, "x" * 1_000_000, truncate_to=-1)

        await trio.to_thread.run_sync(scripted.launching.wait, limiter=trio.CapacityLimiter(1))
        assert service.models.find().engine.statistics().admitted_tokens == 3
        scripted.gate.set()
    assert_idle(service)


@pytest.mark.parametrize(("text", "is_refused"), [("! " * 30, True), ("hello" * 40, False)])
async def test_vectors_per_token_are_counted_once_their_tokens_are_known(
    service, scripted, monkeypatch, text, is_refused
):
    """Four characters are a token in neither: 30 marks are 30 tokens, and 200 letters that are no word are one."""
    monkeypatch.setattr("trio_pool_serve.tasks.pool.MAX_TOKEN_NUMBERS", 8 * 40)
    job, context = PoolJob(prompts=[TextPrompt(text)] * 2, tasks=("token_embed",)), RequestContext()
    if is_refused:
        with pytest.raises(InvalidRequestError, match="64 token vectors of 8 numbers"):
            await pool(service.model(), job, context)
        assert scripted.batches == []
    else:
        assert [len(vectors) for (vectors,) in (await pool(service.model(), job, context)).rows] == [3, 3]
        assert context.reservation.nbytes == 6 * 8 * 16
    assert_idle(service)


async def test_no_row_is_queued_before_the_vectors_of_all_are_counted(service, scripted, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.tasks.pool.MAX_TOKEN_NUMBERS", 8 * 22 * 99)
    prompts = [TextPrompt(words(20))] * 100  # more than a chunk
    with pytest.raises(InvalidRequestError, match="2200 token vectors"):
        await pool(service.model(), PoolJob(prompts=prompts, tasks=("token_embed",)), RequestContext())
    assert scripted.batches == []
    assert_idle(service)


async def test_the_vectors_of_chunks_count_as_memory_of_the_request(service, scripted):
    serve_as(service, Chunkable())
    prompt, context = ChunkedPrompt("hello world w1 w2", ((0, 5), (6, 11), (12, 17))), RequestContext()
    await pool(service.model(), PoolJob(prompts=[prompt]), context)
    assert context.reservation.nbytes == 3 * 8 * 16
    full = RequestContext(reservation=Reservation(MemoryBudget(max_bytes=1), Client()))
    full.reservation.budget.add(Client("another"), 1)
    with pytest.raises(OverloadedError):
        await pool(service.model(), PoolJob(prompts=[prompt]), full)


async def test_vectors_per_token_that_would_fill_the_memory_are_refused(service, scripted, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.tasks.pool.MAX_TOKEN_NUMBERS", 8 * 20)
    job = PoolJob(prompts=[TokensPrompt(np.arange(5, 16))] * 2, tasks=("token_embed",))
    with pytest.raises(InvalidRequestError, match="22 token vectors of 8 numbers"):
        await pool(service.model(), job, RequestContext())
    assert scripted.batches == []
    assert len((await pool(service.model(), attrs.evolve(job, prompts=job.prompts[:1]), RequestContext())).rows) == 1
    assert_idle(service)
