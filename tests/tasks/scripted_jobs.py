"""Jobs over a service with a scripted runner, and what that has read of them."""

from typing import Any

import attrs

from tests.model_folders import VOCABULARY
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.prompts import Prompt, TextPrompt
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import Pooled, PoolJob, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.score import ScoreJob, Scores, score
from trio_pool_serve.types import PoolingRequest

CLS, SEP = VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]

READING = {field.name for field in attrs.fields(InputParams)}


async def embed(service: Service, *prompts: str | Prompt, **params: Any) -> Pooled:
    """Embed texts and other prompts; ``params`` are of the job and of ``InputParams``."""
    input_params = InputParams(**{name: params.pop(name) for name in READING & set(params)})
    asked = [TextPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return await pool(service.model(), PoolJob(prompts=asked, input_params=input_params, **params), RequestContext())


async def scores(service: Service, queries: list[str], documents: list[str], **more: Any) -> Scores:
    return await score(service.model(), ScoreJob(queries=queries, documents=documents, **more), RequestContext())


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{n % 200}" for n in range(first, first + count))


def ids_of(text: str) -> list[int]:
    """The ids of words, with the special tokens around them."""
    return [CLS, *(VOCABULARY[word] for word in text.split()), SEP]


def rows_of(scripted: ScriptedRunner) -> list[PoolingRequest]:
    return [request for batch in scripted.batches for request in batch.requests]


def read(scripted: ScriptedRunner) -> list[list[int]]:
    """What the model has read; threads render in any order."""
    return sorted(row.prompt.token_ids.tolist() for row in rows_of(scripted))
