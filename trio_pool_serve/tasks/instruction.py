"""The instruction of a request: the client's own text, or a prompt template of the model, in front of its inputs."""

from typing import get_args

from trio_pool_serve.errors import require_request
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import InputType
from trio_pool_serve.tasks.input_params import InputParams

INSTRUCTION_CHARACTERS_PER_TOKEN = 8
"""Limits a client's instruction by the model's maximum length: few tokens of any script are longer."""


def instruction_of(folder: AnyModelFolder, input_params: InputParams, max_model_len: int) -> str:
    """Return what is put in front of a request's inputs; empty for nothing. Raises ``InvalidRequestError``.

    The client's own text comes first, then the template that it names, the template of its input type, the default.
    """
    prompts, name = folder.prompts, input_params.prompt_name
    if input_params.instruction is not None:
        # A longer one would be copied to every prompt, and leave no tokens for the texts.
        limit = max_model_len * INSTRUCTION_CHARACTERS_PER_TOKEN
        require_request(
            len(input_params.instruction) <= limit,
            f"{{instruction}} has {len(input_params.instruction)} characters; the limit is {limit}.",
            field="instruction",
        )
        # The marker of the input type of late interaction stays in front.
        keeps_marker = folder.spec.keeps_input_type_prompt
        marker = prompts.get(input_params.effective_input_type or "", "") if keeps_marker else ""
        return marker + input_params.instruction
    if name is not None:
        # The names of input types are accepted for every model, as in sentence-transformers.
        require_request(
            name in prompts or name in get_args(InputType),
            f"{{prompt_name}} {name!r} is not a prompt of this model; its prompts: "
            f"{', '.join(sorted(prompts)) or 'none'}.",
            field="prompt_name",
        )
        return prompts.get(name, "")
    if input_params.input_type is not None:
        # Without the default prompt, as encode_query and encode_document of sentence-transformers.
        return prompts.get(input_params.input_type, "")
    default = folder.default_prompt
    return prompts.get(folder.default_prompt_name or "", "") if default is None else default
