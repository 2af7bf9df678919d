"""Input params: how the client wants a job's texts to be rendered."""

from collections.abc import Mapping

from attrs import frozen

from trio_pool_serve.prompts import InputType, TextPrompt, TruncationSide


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
