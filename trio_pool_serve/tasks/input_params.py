"""Input params: how the client wants a job's texts to be rendered."""

from collections.abc import Mapping
from typing import get_args

from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import InputType, RenderingParams, TextPrompt, TruncationSide
from trio_pool_serve.tasks.model import Model

INSTRUCTION_CHARACTERS_PER_TOKEN = 8
"""Limits a client's instruction by the model's maximum length: few tokens of any script are longer."""


@frozen(kw_only=True)
class InputParams:
    """Options of a request for the rendering of its texts.

    ``truncate_to`` is in tokens; −1 is the model's maximum. If it is ``None``, ``--long-text`` decides about longer
    inputs, with ``dialect_truncates`` as its default; with ``refuses_longer`` they are refused. ``instruction`` is the
    client's own text; ``prompt_name`` selects one of the model's prompt templates. Without either, ``input_type``
    selects the model's template for queries or documents. ``task`` selects an adapter of a model that has some for its
    tasks, by default ``prompt_name`` or ``input_type`` does. ``truncation_side`` is by default the tokenizer's.
    """

    truncate_to: int | None = None
    refuses_longer: bool = False
    dialect_truncates: bool = False
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None
    instruction: str | None = None
    input_type: InputType | None = None
    task: str | None = None

    @property
    def effective_input_type(self) -> InputType | None:
        """``input_type``, else ``prompt_name`` if it names an input type."""
        by_name: Mapping[str | None, InputType] = {"query": "query", "document": "document"}
        return self.input_type or by_name.get(self.prompt_name)

    def estimated_tokens(self, texts: int) -> int:
        """Estimate the tokens that the client's instruction adds to ``texts`` texts, for admission."""
        return TextPrompt(self.instruction).estimated_tokens * texts if self.instruction else 0


def rendering_params(model: Model, input_params: InputParams) -> RenderingParams:
    """Return the renderer's params for a model. Raises ``InvalidRequestError``."""
    limit = model.renderer.max_model_len
    truncate_to = input_params.truncate_to
    truncates = model.long_text == "truncate" or (input_params.dialect_truncates and model.long_text != "refuse")
    if truncate_to is None and truncates and not input_params.refuses_longer:
        truncate_to = -1
    if truncate_to is not None and truncate_to > limit:
        # Clients know the error by the words of vLLM's sentences.
        raise InvalidRequestError(
            f"{{truncate_to}} must be -1 or from 1 to {limit}, not {truncate_to}: that is greater than max_model_len. "
            "Please request a smaller truncation size.",
            field="truncate_to",
        )
    if truncate_to not in (None, -1) and truncate_to < 1:
        raise InvalidRequestError(
            f"{{truncate_to}} must be -1 or from 1 to {limit}, not {truncate_to}.",
            field="truncate_to",
        )
    return RenderingParams(
        truncate_to=limit if truncate_to == -1 else truncate_to,
        truncation_side=input_params.truncation_side or model.renderer.texts.tokenizers.first.truncation_side,
        add_special_tokens=input_params.add_special_tokens,
        instruction=_instruction(model, input_params),
        input_type=input_params.effective_input_type,
        task=input_params.task or input_params.prompt_name,
    )


def _instruction(model: Model, input_params: InputParams) -> str:
    prompts, name = model.folder.prompts, input_params.prompt_name
    if input_params.instruction is not None:
        # A longer one would be copied to every prompt, and leave no tokens for the texts.
        limit = model.renderer.max_model_len * INSTRUCTION_CHARACTERS_PER_TOKEN
        if len(input_params.instruction) > limit:
            raise InvalidRequestError(
                f"{{instruction}} has {len(input_params.instruction)} characters; the limit is {limit}.",
                field="instruction",
            )
        # The marker of the input type of late interaction stays in front.
        keeps_marker = model.folder.spec.keeps_input_type_prompt
        marker = prompts.get(input_params.effective_input_type or "", "") if keeps_marker else ""
        return marker + input_params.instruction
    if name is not None:
        # The names of input types are accepted for every model, as in sentence-transformers.
        if name not in prompts and name not in get_args(InputType):
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequestError(
                f"{{prompt_name}} {name!r} is not a prompt of this model; its prompts: {known}.", field="prompt_name"
            )
        return prompts.get(name, "")
    if input_params.input_type is not None:
        # Without the default prompt, as encode_query and encode_document of sentence-transformers.
        return prompts.get(input_params.input_type, "")
    default = model.folder.default_prompt
    return prompts.get(model.folder.default_prompt_name or "", "") if default is None else default
