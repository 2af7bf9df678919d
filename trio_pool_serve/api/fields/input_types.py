"""What texts are embedded for: Cohere's and Voyage's ``input_type``, Jina's ``task``."""

from collections.abc import Mapping, Sequence

from attrs import evolve

from trio_pool_serve.api.fields.given_fields import quoted
from trio_pool_serve.errors import InvalidRequestError
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
"""The sides of a search, by the names that the dialects have for them."""


def with_input_type(
    job: PoolJob, input_type: str | None, model: Model, *, others: Sequence[str] = (), param: str = "input_type"
) -> PoolJob:
    """Return a job whose texts get the model's prompt for an input type.

    That is the prompt of that very name, if the model has one; otherwise, for the two sides of a search, the model's
    prompt for that side. ``others``, which the dialect also knows, change nothing then. A prompt that the client has
    chosen itself stays. Raises ``InvalidRequestError`` for other values of the field ``param``.
    """
    if input_type is None:
        return job
    prompts = model.folder.prompts
    if input_type not in {*INPUT_TYPES, *others, *prompts}:
        own = f", or a prompt of the model: {', '.join(sorted(prompts))}" if prompts else ""
        known = ", ".join(sorted({*INPUT_TYPES, *others}))
        raise InvalidRequestError(f"{param} must be one of {known}{own}; not {quoted(input_type)}.", param=param)
    input_params = job.input_params
    chosen = input_params.prompt_name is not None or input_params.instruction is not None
    named = input_type if input_type in prompts and not chosen else input_params.prompt_name
    return evolve(job, input_params=evolve(input_params, input_type=INPUT_TYPES.get(input_type), prompt_name=named))
