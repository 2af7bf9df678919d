"""Computes rows with a model in this process: the server's engine, without HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import define, evolve, field

from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TextOptions
from trio_pool_serve.bulk.table_task import TableComputer, TaskOptions, Values, compute_halving, compute_parts
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.engine.process_placement import has_gpu
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.process_setup import in_process_config, open_service
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.runs.run import WindowResult
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import RowResult
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.threads.offload import NICENESS
from trio_pool_serve.types import Client

ROWS_PER_JOB = 256
"""If a job fails because of one row, both halves are computed again, and so on down to the row."""


@define(eq=False)
class OwnEngine(TableComputer):
    """Computes windows of rows in planned batches, so that the same rows give the same bytes."""

    service: Service
    location: str
    """The folder of the model or its id on the hub, as in the options."""
    _identity: dict[str, str] | None = field(init=False, default=None)
    _context: RequestContext = field(
        init=False, factory=lambda: RequestContext(client=Client("bulk", is_background=True))
    )

    async def compute(self, rows: Sequence[InputRow]) -> WindowResult[RowResult]:
        """Compute rows of a window; see ``Computer``."""
        jobs = self.parts_of(rows, ROWS_PER_JOB)
        window = PlannedWindow(len(jobs))
        compute_job = self.score if self.task.record.model_task == "score" else self.pool

        async def compute(index: int) -> WindowResult[RowResult]:
            with window.members[index] as member:
                model = evolve(self.service.model(), window=member)
                return await compute_halving(jobs[index], partial(compute_job, model), (PoolServeError,))

        return await compute_parts(len(jobs), compute)

    async def identity(self) -> dict[str, str]:
        """Return the properties of the model that a journal keeps; they are computed once. Cancellation: at once."""
        if self._identity is None:
            self._identity = await identity_of(self.service, self.location, await self.digest_of_sample())
        return self._identity

    async def digest_of_sample(self) -> str:
        """Return a digest of the outputs for some rows: it differs if a library or the CPU computes differently.

        Cancellation: at once.
        """
        rows = [InputRow(number, "", number, values) for number, values in enumerate(self.task.record.sample)]
        plain = evolve(self, task=evolve(self.task, dimensions=None, dtype="float32", top_n=None))
        results = (await plain.compute(rows)).rows
        return blake2b(repr([_exact(result) for result in results]).encode(), digest_size=16).hexdigest()

    def _input_params(self) -> InputParams:
        return InputParams(
            truncate_to=-1 if self.text.truncate else None,
            prompt_name=self.text.prompt_name,
            input_type=self.text.input_type,
        )

    async def pool(self, model: Model, rows: Sequence[Values]) -> tuple[list[Values], int]:
        """Return the outputs for one text per row."""
        (texts,), record = self.task.texts_of(rows), self.task.record
        job = PoolJob(
            prompts=list(map(TextPrompt, texts)),
            tasks=(record.model_task,),
            input_params=self._input_params(),
            dimensions=self.task.dimensions,
            # As ``/pooling`` does.
            normalize=True if record.model_task == "token_embed" and model.folder.spec.normalizes else None,
        )
        pooled = await pool(model, job, self._context)
        return [self.task.written(record.of_output(model, row)) for (row,) in pooled.rows], pooled.prompt_tokens

    async def score(self, model: Model, rows: Sequence[Values]) -> tuple[list[Values], int]:
        """Return the score of each row's two texts; for ``rerank`` the indices and scores of documents, best first."""
        queries, documents = self.task.texts_of(rows)
        job = ScoreJob(queries=queries, documents=documents, input_params=self._input_params())
        scores = await score(model, job, self._context)
        if not self.task.record.is_ranking:
            return [(value,) for value in scores.values], scores.prompt_tokens
        order = np.argsort(-scores.values, kind="stable")[: self.task.top_n]
        return [((order.astype(np.int32), scores.values[order]),)], scores.prompt_tokens


def _exact(result: RowResult) -> list[Any]:
    """Return the error and the values of a result, arrays as their bytes."""
    values = [part for value in result.values for part in (value if isinstance(value, tuple) else (value,))]
    return [
        result.error,
        *(value.tobytes() if isinstance(value, np.ndarray | np.generic) else value for value in values),
    ]


def open_own_service(location: str, options: OwnModelOptions) -> AbstractAsyncContextManager[Service]:
    """Load a model with a command's options, and run its engine for as long as the block lasts.

    Raises and is cancelled as ``open_service``.
    """
    config = in_process_config(location, **options.settings)
    # On CPU, nothing else in this process needs to be computed sooner.
    return open_service(config, NICENESS if has_gpu(config.loading) else 0)


async def identity_of(service: Service, location: str, sample: str) -> dict[str, str]:
    """Return the properties of a model that a journal keeps; ``sample`` is a digest of its outputs for a sample.

    Cancellation: once the model's files have been read.
    """
    model = service.model()
    digest = await service.offload.run("files", partial(digest_of, model.folder.path, service.config.loading))
    return {
        "--model": location,
        "the maximum of tokens in a text": str(model.renderer.max_model_len),
        "the maximum of tokens in a batch": str(model.engine.facts.max_batch_tokens),
        "the digest of the model's settings and weights": " ".join(digest),
        "the digest of what the model computes from a sample": sample,
    }


@asynccontextmanager
async def open_own_engine(
    location: str, options: OwnModelOptions, task: TaskOptions, text: TextOptions
) -> AsyncIterator[OwnEngine]:
    """Load a model and compute with it for as long as the block lasts.

    Raises ``ModelLoadError``, ``InvalidRequestError`` if the model cannot do the task, and ``EngineDeadError`` if the
    engine ends. Cancellation: at once.
    """
    async with open_own_service(location, options) as service:
        model = service.model()
        model.require(task.record.model_task)
        yield OwnEngine(task, text, task.output_columns(model.engine.facts.dimensions), service, location)
