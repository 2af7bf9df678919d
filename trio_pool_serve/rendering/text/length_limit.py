"""The length limit of an input, and the error for longer ones."""

from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import RenderingParams


def available_tokens(params: RenderingParams, max_model_len: int, taken: int, kind: str = "special") -> int:
    """Return how many tokens remain for an input after ``taken`` ones of a kind. Raises ``InvalidRequestError``."""
    limit = min(max_model_len, params.truncate_to or max_model_len)
    if limit <= taken:
        raise InvalidRequestError(
            f"Truncating to {limit} tokens leaves none for the input after {taken} {kind} tokens.",
            field="truncate_to",
        )
    return limit - taken


def too_long(length: str, limit: int) -> ContextLengthError:
    """Return the error for an input of ``length`` tokens."""
    # Clients know the error by OpenAI's wording of the first sentence, and vLLM's of the last.
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, an input has {length} tokens. "
        "Please reduce the length of the input, or have it truncated ({truncate_to}).",
        field="prompts",
    )
