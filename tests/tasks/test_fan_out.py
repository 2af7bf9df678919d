"""One request is one nursery: its prompts render and compute as children of it."""

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import trio
from attrs import define
from tokenizers import Tokenizer as Backend
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import engine_over, in_thread, running
from tests.model_folders import VOCABULARY
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import until
from tests.tasks.scripted_jobs import words
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.errors import (
    BatchFailedError,
    ContextLengthError,
    InvalidRequestError,
)
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import Prompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Encoded, TokenizerPool
from trio_pool_serve.tasks.fan_out import CHUNK_ROWS, CHUNKS_AHEAD, ComputedRow, RowDone, RowToCompute, compute_rows
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, Embed, PooledBatch

pytestmark = pytest.mark.unit


class NotingTokenizer(FastTokenizer):
    """Notes the texts in the order in which it gets them; waits with each batch until ``gate`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Backend.from_file(str(folder / "tokenizer.json")), frozenset())
        self.texts: list[str] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def encode_all(self, texts: Sequence[str]) -> Sequence[Encoded]:
        self.texts.extend(texts)
        self.entered.set()
        assert self.gate.wait(60)
        return super().encode_all(texts)


@define(eq=False)
class Floor:
    """A renderer of one thread and an engine of one batch in flight, introduced to each other."""

    folder: AnyModelFolder
    tokenizer: NotingTokenizer
    runner: ScriptedRunner
    offload: Offload
    renderer: Renderer
    engine: Engine

    async def compute(
        self, *prompts: Prompt | str, timings: RequestTimings | None = None, row_done: RowDone | None = None
    ) -> list[ComputedRow]:
        """Compute each prompt with params of its own, so that equal ones are rows of their own."""
        asked = [TextPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        model = Model("m", self.folder, self.renderer, self.engine, self.engine.facts.dimensions)
        rows = [RowToCompute(prompt, RenderingParams(), (Embed(),)) for prompt in asked]
        with model.admit(EstimatedWork(tokens=len(asked), rows=len(asked))) as admitted:
            return await compute_rows(model, rows, admitted, timings or RequestTimings(), row_done)

    async def assert_idle(self) -> None:
        """Threads that were rendering for a client that left may still have to finish."""
        await until(lambda: not self.offload.statistics()["render"].borrowed)
        engine = self.engine.statistics()
        assert (engine.queued_rows, engine.queued_tokens, engine.in_flight_batches) == (0, 0, 0)
        for kind, limiter in self.offload.statistics().items():
            assert (limiter.borrowed, limiter.waiting) == (0, 0), kind
        assert repr(self.renderer.texts.tokenizers) == "<TokenizerPool 1 of 1 free>"


@pytest.fixture
async def floor(scripted_folder: Path, scripted: ScriptedRunner, one_in_flight: None) -> AsyncIterator[Floor]:
    offload, folder, tokenizer = Offload(render=1), read_model_folder(scripted_folder), NotingTokenizer(scripted_folder)
    texts = TextRenderer(TokenizerPool(tokenizer, 1), max_model_len=folder.max_model_len, vocab_size=folder.vocab_size)
    renderer = Renderer(texts, offload, loop_characters=0)
    async with running(engine_over(scripted, offload=offload, max_batch_tokens=16)) as engine:
        yield Floor(folder, tokenizer, scripted, offload, renderer, engine)


async def open_gate_when_queued(floor: Floor, rows: int) -> None:
    """Wait until the engine has so many rows, including those of the one launched batch; then compute them."""
    await in_thread(floor.runner.launching.wait)
    while floor.engine.statistics().queued_rows + floor.runner.rows[-1] < rows:
        await trio.lowlevel.checkpoint()
    floor.runner.gate.set()


TOO_LONG = words(63)
OUTSIDE = TokensPrompt(np.array([10_000]))


async def test_texts_and_token_ids_may_be_mixed_and_no_prompts_are_no_rows(floor):
    rows = await floor.compute("hello", TokensPrompt(np.array([5, 6, 7, 8])))
    assert [row.tokens for row in rows] == [row.values[0][0] for row in rows] == [3, 4]
    assert await floor.compute() == []


async def test_the_rows_of_one_request_are_one_flow_of_their_own(floor):
    for _ in range(2):
        await floor.compute("hello", "hello", "hello")
    groups = [row.group for batch in floor.runner.batches for row in batch.requests]
    assert len(groups) == 6
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1
    assert groups[0] != groups[3]
    assert all(0 < group < 2**63 for group in groups)


async def test_timings_are_those_of_the_whole_request(floor):
    timings = RequestTimings()
    await floor.compute(*["hello"] * 9, timings=timings)
    assert timings.rows == 9
    assert min(timings.render_s, timings.queue_s, timings.forward_s) > 0


async def test_admission_counts_rendered_rows_until_they_are_computed(floor):
    counted: list[int] = []

    def count(*_: object) -> None:
        counted.append(floor.engine.statistics().admitted_tokens)

    await floor.compute(*["hello"] * 3, timings=RequestTimings(on_tokens=count), row_done=count)
    assert counted == [9, 0, 0, 0], "all three are of one batch"


# -- the first failure --------------------------------------------------------------------------------


async def test_the_first_failure_stops_the_rest_from_being_rendered(floor):
    with pytest.raises(ContextLengthError, match="65 tokens"):
        await floor.compute(*["good"] * 10, TOO_LONG, *["never"] * 200)
    assert floor.tokenizer.texts.count(TOO_LONG) == 1
    # The thread may have taken up those that waited in line with the failed one.
    assert floor.tokenizer.texts.count("never") <= CHUNKS_AHEAD * CHUNK_ROWS
    assert await floor.compute("still there")
    await floor.assert_idle()


async def test_what_was_rendered_before_a_failure_leaves_the_queue(floor):
    floor.runner.gate.clear()
    with pytest.raises(InvalidRequestError, match="token id 10000"):
        await floor.compute(*["good"] * 20, OUTSIDE, *["never"] * 200)
    engine = floor.engine.statistics()
    assert (engine.queued_rows, engine.queued_tokens) == (0, 0)
    floor.runner.gate.set()
    await floor.compute("the next client's")
    assert len(floor.runner.batches) <= 2, "of the failed request, at most what had been launched by then"
    await floor.assert_idle()


async def test_several_failures_are_one_error_not_a_group(floor):
    def fail(_: Batch) -> PooledBatch:
        raise ValueError("boom")

    floor.runner.on_launch = fail
    floor.runner.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_gate_when_queued, floor, 6)
        with pytest.raises(BatchFailedError):
            await floor.compute(*["together"] * 6)


async def test_a_row_that_fails_its_batches_fails_the_request_and_its_siblings_are_not_computed(floor):
    def fail_the_guilty(batch: Batch) -> PooledBatch | None:
        if any(VOCABULARY["hello"] in request.prompt.token_ids for request in batch.requests):
            raise ValueError("boom")
        return None

    floor.runner.on_launch = fail_the_guilty
    floor.runner.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_gate_when_queued, floor, 40)
        with pytest.raises(BatchFailedError):
            await floor.compute("hello", *["good"] * 39)
    await floor.compute("the next client's")
    # Two batches of the request, the halves of the first (of 21 rows: 5 times 2 of them at most), and the next one.
    assert len(floor.runner.batches) <= 2 + 10 + 1
    await floor.assert_idle()


async def test_errors_of_the_server_itself_are_raised_as_they_are(floor):
    floor.renderer.texts.vocab_size = None
    with pytest.raises(TypeError):
        await floor.compute(TokensPrompt(np.array([1])))
    with pytest.RaisesGroup(TypeError, TypeError, flatten_subgroups=True):
        await floor.compute(*[TokensPrompt(np.array([1]))] * 2 * CHUNK_ROWS)


# -- several clients ----------------------------------------------------------------------------------


async def test_a_single_prompt_does_not_wait_behind_all_of_a_large_request(floor):
    floor.tokenizer.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(floor.compute, *["large"] * 300)
        await in_thread(floor.tokenizer.entered.wait)
        await wait_all_tasks_blocked()
        render = floor.offload.statistics()["render"]
        assert (render.borrowed, render.waiting) == (floor.renderer.offload.render, CHUNKS_AHEAD)
        nursery.start_soon(floor.compute, "small")
        await wait_all_tasks_blocked()
        floor.tokenizer.gate.set()
    assert floor.tokenizer.texts.index("small") <= (floor.renderer.offload.render + CHUNKS_AHEAD) * CHUNK_ROWS
    assert len(floor.tokenizer.texts) == 301


# -- leaving ------------------------------------------------------------------------------------------


async def test_leaving_while_a_chunk_is_tokenised_renders_no_other(floor):
    floor.tokenizer.gate.clear()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(floor.compute, *["leaving"] * 30)
            await in_thread(floor.tokenizer.entered.wait)
            await wait_all_tasks_blocked()
            scope.cancel()
            floor.tokenizer.gate.set()
    assert scope.cancelled_caught
    await floor.assert_idle()
    assert floor.tokenizer.texts == ["leaving"] * CHUNK_ROWS, "the thread ends what it has begun, and that is all"
    assert floor.runner.batches == []
