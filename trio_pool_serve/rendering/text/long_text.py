"""The length limit of an input: an input that is longer is truncated where the request allows it, else refused.

Whether a request allows it is decided by ``rendering_params`` in ``tasks/input_params.py``.
"""

from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import RenderingParams
from trio_pool_serve.rendering.text.excerpt import Excerpt, encode_excerpt
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer


def encode_input(
    tokenizer: Tokenizer,
    text: str,
    params: RenderingParams,
    max_model_len: int,
    taken: int,
    kind: str = "special",
    *,
    positions: bool = False,
    encoded: Encoded | None = None,
) -> tuple[Excerpt, int]:
    """Tokenise enough of an input; return also how many tokens of it are kept besides ``taken`` ones of a kind.

    ``encoded`` are the tokens of all of it, if they are known.

    Raises ``ContextLengthError`` if the input is too long and must not be truncated, and as ``available_tokens``.
    """
    keep = available_tokens(params, max_model_len, taken, kind)
    if encoded is not None:
        excerpt = Excerpt(encoded, is_whole=True)
    else:
        excerpt = encode_excerpt(tokenizer, text, keep, params.truncation_side, positions=positions)
    if params.truncate_to is None and not excerpt.fits(keep):
        length = excerpt.tokens + taken
        raise too_long(f"{length}" if excerpt.is_whole else f"more than {length}", max_model_len)
    return excerpt, keep


def available_tokens(params: RenderingParams, max_model_len: int, taken: int, kind: str = "special") -> int:
    """Return how many tokens remain for an input after ``taken`` ones of a kind. Raises ``InvalidRequestError``."""
    limit = min(max_model_len, params.truncate_to or max_model_len)
    if limit <= taken:
        raise InvalidRequestError(
            f"An input is truncated to {limit} tokens, which {taken} {kind} tokens fill: no token of the text is left.",
            field="truncate_to",
        )
    return limit - taken


def too_long(length: str, limit: int) -> ContextLengthError:
    """Return the error for an input of ``length`` tokens."""
    # Clients know the error by OpenAI's wording of the second sentence, and vLLM's of the last.
    return ContextLengthError(
        f"An input has {length} tokens. This model's maximum context length is {limit} tokens. "
        "Please reduce the length of the input, or truncate it (`{truncate_to}`).",
        field="prompts",
    )
