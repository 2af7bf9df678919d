"""The row that an engine computes by itself, at its start and while it is idle."""

import numpy as np
import pytest
import trio
import trio.testing

from tests.engine.test_local import engine_over, request, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.errors import EngineDeadError, ModelLoadError
from trio_pool_serve.types import CopiedBatch

PROBE = request(5, 6)


async def until(condition) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  (time has to pass)
            await trio.sleep(0.002)


def broken(_) -> None:
    raise ValueError("broken")


async def test_an_engine_is_ready_once_it_has_computed_a_row():
    runner = ScriptedRunner(probe_request=PROBE)
    async with running(engine_over(lambda: runner)) as engine:
        assert [batch.requests for batch in runner.batches] == [(PROBE,)]
        assert engine.statistics().state == "ready"
        assert engine.probe_request is PROBE


async def test_a_model_that_cannot_compute_its_first_row_ends_the_engine_as_one_that_cannot_be_loaded():
    engine = engine_over(lambda: ScriptedRunner(probe_request=PROBE, on_launch=broken))
    with pytest.raises(ModelLoadError, match="cannot compute"):
        await engine.run()
    with pytest.raises(EngineDeadError):
        await engine.wait_ready()


async def test_a_model_that_answers_nan_ends_the_engine_as_one_that_cannot_be_loaded():
    nan = CopiedBatch([(np.array([np.nan], dtype=np.float32),)])
    engine = engine_over(lambda: ScriptedRunner(probe_request=PROBE, on_launch=lambda _: nan))
    with pytest.raises(ModelLoadError, match="not finite"):
        await engine.run()


async def test_an_idle_engine_computes_a_row_now_and_then_and_is_stalled_while_that_fails():
    runner = ScriptedRunner(probe_request=PROBE)
    async with running(engine_over(lambda: runner, probe_interval_s=0.01)) as engine:
        await until(lambda: len(runner.batches) > 3)
        assert engine.statistics().state == "ready"
        runner.on_launch = broken
        await until(lambda: engine.statistics().state == "stalled")
        assert "probe pass failed" in engine.stall_reason
        runner.on_launch = None
        await until(lambda: engine.statistics().state == "ready")


async def test_an_idle_engine_computes_nothing_by_default():
    runner = ScriptedRunner(probe_request=PROBE)
    async with running(engine_over(lambda: runner)):
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(runner.batches) == 1
