"""Requests of text-embeddings-inference, and their jobs. Every optional field may be null."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.fields.given_fields import refused
from trio_pool_serve.api.fields.input_fields import Input, prompts_of
from trio_pool_serve.api.fields.numbers import Dimensions, TokenId, TopN, require_few, require_some
from trio_pool_serve.api.fields.ranking import require_top
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import PairPrompt, Prompt, TextPrompt, TokensPrompt, TruncationSide
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.types import PoolingTask

Sequences = str | list[str | list[str]]
"""One text; one text or pair in a list; a list of those."""

NOT_DENSE = "weights over the vocabulary are neither cut nor normalised"


@frozen(kw_only=True)
class TextOptions:
    """Fields about truncation and prompts, which most requests have."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None

    def input_params(self) -> InputParams:
        """Return them as the job has them. Raises ``InvalidRequestError``."""
        return InputParams(
            truncate_to=-1 if self.truncate else None,
            refuses_longer=self.truncate is False,
            dialect_truncates=True,
            truncation_side=_side(self.truncation_direction),
            prompt_name=self.prompt_name,
        )


def _side(direction: str | None) -> TruncationSide:
    # Documented as Right and Left; clients send both in lower case too.
    match (direction or "right").lower():
        case "right":
            return "right"
        case "left":
            return "left"
    raise InvalidRequestError(
        f"truncation_direction must be Right or Left, not {direction!r}.", param="truncation_direction"
    )


@frozen(kw_only=True)
class EmbedRequest(TextOptions):
    """The body of ``/embed`` and ``/embed_all``."""

    inputs: Input
    model: str | None = None
    normalize: bool | None = None
    dimensions: Dimensions | None = None

    def dense(self, network: NetworkConfig) -> PoolJob:
        """Return the job of a vector per text, of unit length unless ``normalize`` is false."""
        return self._job(network, "embed", normalize=self.normalize is not False)

    def all_tokens(self, network: NetworkConfig) -> PoolJob:
        """Return the job of a vector per token; without ``normalize`` their lengths are the model's own."""
        return self._job(network, "token_embed", normalize=self.normalize)

    def _job(self, network: NetworkConfig, task: PoolingTask, *, normalize: bool | None) -> PoolJob:
        return PoolJob(
            prompts=list(map(_not_empty, prompts_of(self.inputs, network, param="inputs"))),
            tasks=(task,),
            input_params=self.input_params(),
            dimensions=self.dimensions,
            normalize=normalize,
        )


@frozen(kw_only=True)
class EmbedSparseRequest(EmbedRequest):
    """The body of ``/embed_sparse``."""

    normalize: bool | None = refused(NOT_DENSE, [False])
    dimensions: Dimensions | None = refused(NOT_DENSE)

    def sparse(self, network: NetworkConfig) -> PoolJob:
        """Return the job of weights over the vocabulary."""
        return self._job(network, "sparse_embed", normalize=None)


@frozen(eq=False)
class PredictJob:
    """Texts or pairs to classify, with ``top_k`` labels each; ``is_batch`` has the response list them."""

    pooling: PoolJob
    is_batch: bool
    top_k: int | None = None


@frozen(kw_only=True)
class PredictRequest(TextOptions):
    """The body of ``/predict``. A list of texts is one text, or one pair; a list of lists is a batch."""

    inputs: Sequences
    model: str | None = None
    raw_scores: bool | None = None

    def job(self, network: NetworkConfig) -> PredictJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        kinds = set() if isinstance(self.inputs, str) else set(map(type, self.inputs))
        if len(kinds) > 1:
            raise InvalidRequestError("inputs mixes texts and lists.", param="inputs")
        is_batch = kinds == {list}
        sequences: Sequence[object] = self.inputs if is_batch else [self.inputs]
        require_few(sequences, network, param="inputs")
        pooling = PoolJob(
            prompts=[_not_empty(_sequence(sequence)) for sequence in sequences],
            tasks=("classify",),
            input_params=self.input_params(),
            activation="raw" if self.raw_scores else "probabilities",
        )
        return PredictJob(pooling, is_batch)


def _not_empty(prompt: Prompt) -> Prompt:
    """Return a prompt that has text or tokens. Raises ``EmptyInputError``: these clients find empty documents by it."""
    if prompt == TextPrompt("") or prompt == PairPrompt("", ""):
        raise EmptyInputError("`inputs` cannot be empty", param="inputs")
    return prompt


def _sequence(sequence: object) -> Prompt:
    match sequence:
        case str(text) | [str(text)]:
            return TextPrompt(text)
        case [str(first), str(second)]:
            return PairPrompt(first, second)
        case []:
            raise EmptyInputError("inputs is empty.", param="inputs")
    raise InvalidRequestError("Each of inputs must be a list of one text or of two, a pair.", param="inputs")


@frozen(kw_only=True)
class RerankRequest(TextOptions):
    """The body of ``/rerank``; ``top_n`` is what litellm sends beside TEI's own fields."""

    query: str
    texts: list[str]
    model: str | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: TopN | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_top(self.top_n)
        require_some(self.texts, network, param="texts")
        return ScoreJob(
            queries=[self.query],
            documents=self.texts,
            input_params=self.input_params(),
            activation="raw" if self.raw_scores else "score",
        )


@frozen(kw_only=True)
class SimilarityInputs:
    """A sentence, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


@frozen(kw_only=True)
class SimilarityRequest:
    """The body of ``/similarity``."""

    inputs: SimilarityInputs
    parameters: TextOptions | None = None
    model: str | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        if not self.inputs.sentences:
            raise EmptyInputError("sentences is empty.", param="inputs")
        require_few(self.inputs.sentences, network, param="inputs")
        return ScoreJob(
            queries=[self.inputs.source_sentence],
            documents=self.inputs.sentences,
            input_params=(self.parameters or TextOptions()).input_params(),
            symmetric=True,
        )


@frozen(kw_only=True)
class TokenizeRequest:
    """The body of ``/tokenize``."""

    inputs: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None

    def job(self, network: NetworkConfig) -> list[str]:
        """Return the texts. Raises ``InvalidRequestError``."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not all(texts) or not texts:
            raise EmptyInputError("`inputs` cannot be empty", param="inputs")
        require_few(texts, network, param="inputs")
        return texts


@frozen(kw_only=True)
class DecodeRequest:
    """The body of ``/decode``."""

    ids: list[TokenId | list[TokenId]]
    model: str | None = None
    skip_special_tokens: bool | None = None

    def job(self, network: NetworkConfig) -> list[npt.NDArray[np.int64]]:
        """Return the lists of token ids, each of shape (tokens,). Raises ``InvalidRequestError``."""
        prompts = prompts_of(self.ids, network, param="ids")  # type: ignore[arg-type]
        return [prompt.token_ids for prompt in prompts if isinstance(prompt, TokensPrompt)]
