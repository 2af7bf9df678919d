"""What texts are for, as clients say it: Cohere's and Voyage's ``input_type``, Jina's ``task``."""

from collections.abc import Mapping

from attrs import evolve

from trio_pool_serve.prompts import InputType
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.model import Model

INPUT_TYPES: Mapping[str, InputType] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}
"""The sides of a search, by everybody's names for them."""


def for_purpose(job: PoolJob, purpose: str | None, model: Model) -> PoolJob:
    """Return a job whose texts are read for a purpose.

    A model that has a prompt by that very name is given it. Otherwise the two sides of a search are read as the
    model reads them, and all else as ever. A prompt that the client has chosen itself stays.
    """
    if purpose is None:
        return job
    reading = job.reading
    chosen = reading.prompt_name is not None or reading.instruction is not None
    named = purpose if purpose in model.folder.prompts and not chosen else reading.prompt_name
    return evolve(job, reading=evolve(reading, input_type=INPUT_TYPES.get(purpose), prompt_name=named))
