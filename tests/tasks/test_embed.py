"""The embed task: what a job may ask, and what comes of it."""

import attrs
import numpy as np
import pytest
import trio

from tests.api.scripted_models import Everything, serve_as
from tests.conftest import assert_idle, running
from tests.model_folders import write_json, write_scripted_folder
from tests.tasks.scripted_jobs import embed, ids_of, rows_of, words
from trio_pool_serve.config import Config
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import TextPrompt, TokensPrompt
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, estimated_work, pool, rows_to_compute
from trio_pool_serve.tasks.request_context import RequestContext

pytestmark = pytest.mark.unit


def last_row(scripted) -> list[int]:
    return rows_of(scripted)[-1].prompt.token_ids.tolist()


async def test_token_ids_are_embedded_as_they_are(service, scripted):
    answer = await embed(service, TokensPrompt(np.array([9, 8, 7])), prompt_name="query")
    assert (last_row(scripted), answer.prompt_tokens) == ([9, 8, 7], 3)


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
    service.default.loaded = attrs.evolve(service.default.loaded, long_text="truncate")
    assert (await embed(service, words(150))).prompt_tokens == 64
    assert (await embed(service, words(150), truncate_to=4)).prompt_tokens == 4
    with pytest.raises(ContextLengthError):
        await embed(service, words(150), refuses_longer=True)


@pytest.mark.parametrize("able", [True, False])
async def test_padding_is_for_models_that_pad_every_text(service, scripted, able):
    class Padding(Everything):
        pads_texts = able

    serve_as(service, Padding())
    if able:
        assert (await embed(service, "hello", padded=True)).prompt_tokens == 3
        return
    with pytest.raises(InvalidRequestError, match="Leave out `padded`"):
        await embed(service, "hello", padded=True)
    assert scripted.batches == []


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
        assert service.default.engine.statistics().admitted_tokens == 3
        scripted.gate.set()
    assert_idle(service)


async def test_vectors_per_token_that_would_fill_the_memory_are_refused(service, scripted, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.tasks.pool.MAX_TOKEN_NUMBERS", 8 * 20)
    job = PoolJob(prompts=[TokensPrompt(np.arange(5, 16))] * 2, tasks=("token_embed",))
    with pytest.raises(InvalidRequestError, match="22 token vectors of 8 numbers"):
        await pool(service.model(), job, RequestContext())
    assert scripted.batches == []
    assert len((await pool(service.model(), attrs.evolve(job, prompts=job.prompts[:1]), RequestContext())).rows) == 1
    assert_idle(service)
