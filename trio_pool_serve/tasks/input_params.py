"""How a job's texts are read: from what a client asks to what a renderer takes."""

from collections.abc import Mapping
from typing import get_args

from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import InputType, RenderingParams, TextPrompt, TruncationSide
from trio_pool_serve.tasks.model import Model

INSTRUCTION_CHARACTERS_PER_TOKEN = 8
"""Bounds a client's own instruction by the model's length: no script has many tokens longer than this."""


@frozen(kw_only=True)
class InputParams:
    """What a client may say about how its texts are read, in nobody's dialect.

    ``truncate_to`` is in tokens; −1 stands for the model's maximum, ``None`` refuses longer inputs.
    ``prompt_name`` chooses one of the model's own instructions, ``instruction`` is one of the client's. A
    ``input_type`` chooses the model's own for queries or documents, if nothing else is said.
    """

    truncate_to: int | None = None
    truncation_side: TruncationSide = "right"
    add_special_tokens: bool = True
    prompt_name: str | None = None
    instruction: str | None = None
    input_type: InputType | None = None

    @property
    def effective_input_type(self) -> InputType | None:
        """``input_type``, or else the input type that ``prompt_name`` names."""
        by_name: Mapping[str | None, InputType] = {"query": "query", "document": "document"}
        return self.input_type or by_name.get(self.prompt_name)

    def estimated_tokens(self, texts: int) -> int:
        """Guess cheaply, for admission, what a client's instruction adds to so many texts."""
        return TextPrompt(self.instruction).estimated_tokens * texts if self.instruction else 0


def rendering_params(model: Model, input_params: InputParams) -> RenderingParams:
    """Return how to render for a model. Raises ``InvalidRequestError``."""
    return RenderingParams(
        truncate_to=_truncate_to(model, input_params.truncate_to),
        truncation_side=input_params.truncation_side,
        add_special_tokens=input_params.add_special_tokens,
        instruction=_instruction(model, input_params),
        input_type=input_params.effective_input_type,
    )


def _truncate_to(model: Model, asked: int | None) -> int | None:
    limit = model.renderer.max_model_len
    if asked == -1:
        return limit
    if asked is not None and not 1 <= asked <= limit:
        raise InvalidRequestError(
            f"{{truncate_to}} must be -1 or from 1 to {limit}, the model's maximum, not {asked}.", field="truncate_to"
        )
    return asked


def _instruction(model: Model, input_params: InputParams) -> str:
    prompts = model.folder.prompts
    if input_params.instruction is not None:
        return _marker(model, input_params) + _checked(model, input_params.instruction)
    if input_params.prompt_name is not None:
        if input_params.prompt_name in get_args(
            InputType
        ):  # every model can be asked for these, as in sentence-transformers
            return prompts.get(input_params.prompt_name, "")
        if input_params.prompt_name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequestError(
                f"This model has no prompt named {input_params.prompt_name!r}; it has: {known}.", field="prompt_name"
            )
        return prompts[input_params.prompt_name]
    if input_params.input_type is not None:
        # As sentence-transformers' encode_query and encode_document: the default prompt is not for them.
        return prompts.get(input_params.input_type, "")
    return prompts.get(model.folder.default_prompt_name or "", "")


def _marker(model: Model, input_params: InputParams) -> str:
    """Return what late interaction puts before texts of an input type; a client's instruction does not replace it."""
    if not model.folder.spec.keeps_input_type_prompt or input_params.effective_input_type is None:
        return ""
    return model.folder.prompts.get(input_params.effective_input_type, "")


def _checked(model: Model, instruction: str) -> str:
    """Refuse what would be copied to every prompt and leave no room for any."""
    limit = model.renderer.max_model_len * INSTRUCTION_CHARACTERS_PER_TOKEN
    if len(instruction) > limit:
        raise InvalidRequestError(
            f"The prompt has {len(instruction)} characters; at most {limit} are taken.", field="instruction"
        )
    return instruction
