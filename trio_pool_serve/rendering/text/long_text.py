"""Long texts: an input above the length limit is refused, truncated, or divided into windows.

The request decides; if it does not, ``--long-text`` does, and by default its dialect.
"""

from itertools import takewhile

from trio_pool_serve.config.model_config import LongText
from trio_pool_serve.errors import ContextLengthError, require_request
from trio_pool_serve.prompts import RenderingParams
from trio_pool_serve.rendering.text.excerpt import Excerpt, encode_excerpt
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer, all_ids
from trio_pool_serve.types import TokenIds

MAX_WINDOWS = 512
"""Maximum windows of a text. Each is a row in the queue, and their vectors are combined on the event loop."""


def truncation_of(
    truncate_to: int | None, long_text: LongText | None, limit: int, *, dialect_truncates: bool, refuses_longer: bool
) -> int | None:
    """Return the tokens to which longer inputs of a request are truncated; ``None`` if they are refused or divided.

    ``truncate_to`` is the request's; −1 is the ``limit``. Without it, ``refuses_longer`` refuses them, else
    ``long_text`` decides, by default as the dialect does. Raises ``InvalidRequestError``.
    """
    if truncate_to is None:
        truncates = long_text == "truncate" or (dialect_truncates and long_text != "refuse")
        return limit if truncates and not refuses_longer else None
    # Clients know the error by the words of vLLM's sentences.
    require_request(
        truncate_to <= limit,
        f"{{truncate_to}} must be -1 or from 1 to {limit}, not {truncate_to}: that is greater than max_model_len. "
        "Please request a smaller truncation size.",
        field="truncate_to",
    )
    require_request(
        truncate_to == -1 or truncate_to >= 1,
        f"{{truncate_to}} must be -1 or from 1 to {limit}, not {truncate_to}.",
        field="truncate_to",
    )
    return limit if truncate_to == -1 else truncate_to


def is_divided(long_text: LongText | None, truncate_to: int | None) -> bool:
    """Return whether a longer text to embed is divided into windows, each of which is computed by itself."""
    return long_text == "chunk" and truncate_to is None


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
    require_request(
        limit > taken,
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


def windows_of(
    tokenizer: Tokenizer, instruction: str, text: str, max_model_len: int, *, adds_special_tokens: bool
) -> list[TokenIds]:
    """Return the windows of a text that is too long, each after the instruction and with its special tokens.

    Raises ``InvalidRequestError``, and ``ContextLengthError`` for more than ``MAX_WINDOWS``.
    """
    special = tokenizer.special_tokens if adds_special_tokens else 0
    read = encode_excerpt(tokenizer, instruction + text, MAX_WINDOWS * max_model_len, "right")
    prefix, rest = _split_instruction(tokenizer, instruction, text, read.encoded)
    size = max_model_len - special - len(prefix)
    require_request(
        size > 0, "{instruction} fills the maximum length: no token of the text is left.", field="instruction"
    )
    windows = tokenizer.finish_windows(rest, size, prefix=prefix, add_special_tokens=adds_special_tokens)
    if len(windows) > MAX_WINDOWS or not read.is_whole:
        raise ContextLengthError(
            f"An input is longer than the limit of {MAX_WINDOWS} windows of {size} tokens.",
            field="prompts",
        )
    return windows


def _split_instruction(tokenizer: Tokenizer, instruction: str, text: str, both: Encoded) -> tuple[Encoded, Encoded]:
    """Return the tokens of an instruction and of the text after it, as in ``both``, tokenised together.

    Many tokenizers make a blank at the instruction's end part of the next word. If more than blanks would become part
    of that word, the two are tokenised separately.
    """
    alone = tokenizer.encode(instruction)
    ids = all_ids(tokenizer, alone)
    pairs = zip(ids, all_ids(tokenizer, both), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if tokenizer.decode(ids[shared:].tolist(), skip_special_tokens=False).strip():
        return alone, tokenizer.encode(text)
    return tokenizer.truncate(alone, shared, "right"), tokenizer.truncate(both, len(both) - shared, "left")
