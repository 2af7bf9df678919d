"""Models in this process, without a server: ``open_model`` for Trio, ``Model`` for code that blocks."""

import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from copy import deepcopy
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, get_args

import msgspec
import numpy as np
import trio
from attrs import define, evolve, field, frozen
from msgspec import Meta
from rich.console import Console
from rich.progress import track

from trio_pool_serve.config.setting import did_you_mean
from trio_pool_serve.errors import InputError, InvalidRequestError, PoolServeError, unwrap_exception_groups
from trio_pool_serve.process_setup import ModelSettings, in_process_config, open_service
from trio_pool_serve.processes.large_imports import allow_torch
from trio_pool_serve.prompts import InputType, TextPrompt, TruncationSide
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import MAX_TOKEN_NUMBERS, PoolJob, check_dimensions, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.threads.loop_thread import LoopThread
from trio_pool_serve.types import Activation, Client, PoolingTask, SparseVector, Vectors

Texts: TypeAlias = Iterable[str]
P = ParamSpec("P")
R = TypeVar("R")

CALL_WINDOW_TEXTS, CALL_WINDOWS = 512, 4
"""A call renders and computes at most four windows of this many texts at a time, so its memory is bounded."""

CALLER = Client("python", is_background=True)
"""Calls wait and are never rejected: a program has no other server to go to."""


class Options(TypedDict, total=False):
    """How texts are rendered and when they are computed: ``docs/python.md`` describes each option."""

    input_type: Annotated[InputType | None, Meta(description="'query' or 'document'")]
    prompt_name: Annotated[str | None, Meta(description="a string")]
    instruction: Annotated[str | None, Meta(description="a string")]
    truncate: Annotated[bool | int | None, Meta(description="True, False or a number of tokens")]
    truncation_side: Annotated[TruncationSide | None, Meta(description="'left' or 'right'")]
    add_special_tokens: Annotated[bool, Meta(description="True or False")]
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31, description="an integer of 32 bits")]
    progress: Annotated[bool | None, Meta(description="True or False")]


OTHER_WORDS: Mapping[str, str] = {
    "normalize_embeddings": "normalize",
    "prompt": "instruction",
    "show_progress_bar": "progress",
    "top_k": "top_n",
    "truncate_dim": "dimensions",
    "use_tqdm": "progress",
}
"""Arguments of sentence-transformers and vLLM, and their names here."""


def refuse_unknown(call: str, arguments: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError`` for an argument that a call does not have, and name the argument that was probably meant."""
    for name in arguments:
        if name not in known:
            end = did_you_mean(OTHER_WORDS.get(name, name), known, f"; accepted: {', '.join(known)}.")
            raise TypeError(f"{call}() has no argument `{name}`{end}")


def _with_known_arguments(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a method refuse unknown arguments by its own name, before Python reports missing ones."""
    known = [*[*signature(method).parameters][1:-1], *Options.__annotations__]  # without self and options

    @wraps(method)
    async def call(*args: P.args, **named: P.kwargs) -> R:
        refuse_unknown(method.__name__, named, known)
        return await method(*args, **named)

    return call


@frozen
class RankedDocument:
    """A document's index in the list that was given, and its score."""

    index: int
    score: float


@frozen(eq=False)
class Classes:
    """The labels of a classifier, and their probabilities for each text: float32, shape (texts, labels)."""

    labels: tuple[str, ...]
    probabilities: Vectors


@define(eq=False)
class ModelFacts:
    """The facts of a loaded model, as in its entry of ``/v1/models``."""

    name: str
    tasks: tuple[PoolingTask, ...]
    dimensions: int
    """The length of its vectors; 0 if it has none."""
    max_model_len: int
    """Tokens of an input."""
    labels: tuple[str, ...]
    """The labels of a classifier."""
    fingerprint: str
    """The fingerprint of its computation: the header ``Model-Fingerprint`` of a server."""


@frozen(eq=False)
class AsyncModel(ModelFacts):
    """A loaded model, for the tasks of one Trio event loop. Concurrent calls share its queue and its batches.

    The methods take lists of any length. They raise ``InvalidRequestError`` for inputs and options that the model does
    not accept, ``TypeError`` for inputs that are not strings, and ``EngineDeadError`` once the model is closed.
    Cancellation of each: at once; rows that have not been launched leave the queue.
    """

    service: Service = field(repr=False)

    @_with_known_arguments
    async def embed(
        self, texts: Texts, *, dimensions: int | None = None, normalize: bool | None = None, **options: Unpack[Options]
    ) -> Vectors:
        """Return a vector for each text: float32, shape (texts, dimensions). Cancellation: at once."""
        width = dimensions or self.service.model().engine.facts.dimensions
        return np.asarray(await self._pool("embed", texts, options, width, dimensions=dimensions, normalize=normalize))

    @_with_known_arguments
    async def tokens(
        self,
        texts: Texts,
        *,
        dimensions: int | None = None,
        token_pooling: float | None = None,
        **options: Unpack[Options],
    ) -> list[Vectors]:
        """Return the vectors of each text's tokens: float32, shape (tokens, dimensions). Cancellation: at once."""
        normalize = self.service.model().folder.spec.normalizes or None  # as ``/pooling`` does
        fields: Any = {"dimensions": dimensions, "normalize": normalize, "token_pooling": token_pooling}
        return list(await self._pool("token_embed", texts, options, **fields))

    @_with_known_arguments
    async def sparse(
        self, texts: Texts, *, max_active_dims: int | None = None, **options: Unpack[Options]
    ) -> list[SparseVector]:
        """Return weights over the vocabulary, or over latents, for each text. Cancellation: at once."""
        return list(await self._pool("sparse_embed", texts, options, max_active_dims=max_active_dims))

    @_with_known_arguments
    async def classify(
        self, texts: Texts, *, activation: Activation = "probabilities", **options: Unpack[Options]
    ) -> Classes:
        """Return the probabilities of the labels for each text. Cancellation: at once."""
        rows, model = await self._pool("classify", texts, options, activation=activation), self.service.model()
        numbers = np.stack(rows) if len(rows) else np.empty((0, len(model.folder.spec.labels)), np.float32)
        return Classes(tuple(map(model.label, range(numbers.shape[1]))), numbers)

    @_with_known_arguments
    async def score(
        self, texts_1: str | Texts, texts_2: Texts, *, activation: Activation = "score", **options: Unpack[Options]
    ) -> Vectors:
        """Return the score of each text of ``texts_2``: float32, shape (texts,). Cancellation: at once.

        ``texts_1`` is the text that all are scored against, or a list with one for each.
        """
        first = [texts_1] if isinstance(texts_1, str) else texts_1
        return await self._score({"texts_1": first, "texts_2": texts_2}, activation, options)

    @_with_known_arguments
    async def rerank(
        self, query: str, documents: Texts, *, top_n: int | None = None, **options: Unpack[Options]
    ) -> list[RankedDocument]:
        """Return the ``top_n`` documents with the best scores, best first; by default all. Cancellation: at once."""
        _check({"top_n": top_n})
        scores = await self._score({"query": [query], "documents": documents}, "score", options)
        best = np.argsort(-scores, kind="stable")[:top_n].tolist()
        return [RankedDocument(index, float(scores[index])) for index in best]

    async def _pool(
        self, task: PoolingTask, texts: Texts, options: Options, width: int | None = None, **fields: Any
    ) -> Any:
        """Return the output for each text: a list, or an array if they all have the same ``width``."""
        _check({**options, **fields})
        texts, params, model = _strings("texts", texts), _input_params(options), self.service.model()
        model.require(task)
        numbers = model.renderer.max_model_len * model.engine.facts.dimensions if task == "token_embed" else 1

        async def compute(window: slice) -> None:
            def keep(index: int, outputs: tuple[Any, ...]) -> None:
                rows[window.start + index] = deepcopy(outputs[0])  # a view would keep the outputs of its batch

            prompts, priority = [TextPrompt(text) for text in texts[window]], options.get("priority", 0)
            job = PoolJob(prompts=prompts, tasks=(task,), input_params=params, priority=priority, **fields)
            await pool(model, job, RequestContext(client=CALLER), keep)

        with _named_inputs({}):
            check_dimensions(model, fields.get("dimensions"))
        rows: Any = [None] * len(texts) if width is None else np.empty((len(texts), width), np.float32)
        await _compute_windows({"texts": texts}, MAX_TOKEN_NUMBERS // numbers, compute, options)
        return rows

    async def _score(self, sides: Mapping[str, Texts], activation: Activation, options: Options) -> Vectors:
        """Return the score of each text of the second side against the first, which may be one text for all."""
        _check({**options, "activation": activation})
        inputs = {name: _strings(name, side) for name, side in sides.items()}
        (first, queries), (second, documents) = inputs.items()
        if len(queries) not in (1, len(documents)):
            numbers = f"{first} contains {len(queries)} texts and {second} {len(documents)}"
            raise InvalidRequestError(f"{numbers}; {first} must contain one text or as many as {second}.", param=first)
        params, model, scores = _input_params(options), self.service.model(), np.empty(len(documents), np.float32)
        model.require("score")
        new_job = partial(ScoreJob, input_params=params, activation=activation, priority=options.get("priority", 0))

        async def compute(window: slice) -> None:
            job = new_job(queries=queries if len(queries) == 1 else queries[window], documents=documents[window])
            scores[window] = (await score(model, job, RequestContext(client=CALLER))).values

        await _compute_windows(inputs, CALL_WINDOW_TEXTS, compute, options)
        return scores


async def facts_of(service: Service) -> dict[str, Any]:
    """Return the fields of ``ModelFacts``. Asynchronous, for a thread to call it in the loop; does not wait."""
    model = service.model()
    return {
        "name": model.name,
        "tasks": tuple(sorted(model.folder.spec.tasks)),
        "dimensions": model.engine.facts.dimensions,
        "max_model_len": model.folder.max_model_len,
        "labels": tuple(model.folder.spec.labels),
        "fingerprint": model.computed_by.fingerprint,
    }


@asynccontextmanager
async def open_model(model: str | Path, **settings: Unpack[ModelSettings]) -> AsyncIterator[AsyncModel]:
    """Load a model, a local folder or the id of one on the Hugging Face hub, for as long as the block lasts.

    Raises ``ModelLoadError``, ``EngineDeadError`` if the engine ends, ``TypeError`` for an unknown setting and
    ``ValueError`` for a wrong value. Cancellation: at once.
    """
    refuse_unknown("open_model", settings, ModelSettings.__annotations__)
    async with open_service(in_process_config(str(model), **settings), niceness=None) as service:
        allow_torch()  # for the caller, where the model computes in another process
        yield AsyncModel(**await facts_of(service), service=service)


def _blocking(method: Callable[Concatenate[AsyncModel, P], Awaitable[R]]) -> Callable[Concatenate["Model", P], R]:
    @wraps(method)
    def call(model: "Model", *args: P.args, **options: P.kwargs) -> R:
        # Generators run in the caller's thread: they may be slow, and use its objects.
        inputs = [list(each) if isinstance(each, Iterator) else each for each in args]
        named = {name: list(each) if isinstance(each, Iterator) else each for name, each in options.items()}
        return model.loop.call(lambda opened: method(opened, *inputs, **named))  # type: ignore[arg-type]  # same types

    return call  # type: ignore[return-value]  # mypy takes ``model`` for a name that callers could use


class Model(ModelFacts, AbstractContextManager["Model"]):
    """A loaded model for code that blocks, in any thread: ``open_model`` with an event loop in a thread of its own.

    It is closed at the end of a ``with`` block, by ``close``, with the last reference to it, or with the process.
    Ctrl-C cancels a call. Raises as ``open_model``.
    """

    def __init__(self, model: str | Path, **settings: Unpack[ModelSettings]) -> None:
        refuse_unknown("Model", settings, ModelSettings.__annotations__)
        self.loop = LoopThread(partial(open_model, model, **settings), name="python-api")
        self.close = weakref.finalize(self, self.loop.close)
        """Cancel calls and free the model. Later calls raise ``RuntimeError``."""
        super().__init__(**self.loop.call(lambda opened: facts_of(opened.service)))

    def __exit__(self, *_: object) -> None:
        self.close()

    embed = _blocking(AsyncModel.embed)
    tokens = _blocking(AsyncModel.tokens)
    sparse = _blocking(AsyncModel.sparse)
    classify = _blocking(AsyncModel.classify)
    score = _blocking(AsyncModel.score)
    rerank = _blocking(AsyncModel.rerank)


ACCEPTED: Mapping[str, Any] = Options.__annotations__ | {
    "dimensions": Annotated[int | None, Meta(description="an integer")],
    "normalize": Annotated[bool | None, Meta(description="True or False")],
    "token_pooling": Annotated[
        Annotated[float, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="a number of at least 1")
    ],
    "max_active_dims": Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="an integer of at least 1")
    ],
    "activation": Annotated[Activation, Meta(description=" or ".join(map(repr, get_args(Activation))))],
    "top_n": Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="an integer of at least 1")],
}
"""The type of each argument besides the inputs, and how an error describes it."""


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for a wrong value."""
    for name, value in arguments.items():
        try:
            msgspec.convert(value, ACCEPTED[name])
        except msgspec.ValidationError:
            (accepted,) = ACCEPTED[name].__metadata__
            raise InvalidRequestError(f"{name} must be {accepted.description}, not {value!r}.", param=name) from None


def _input_params(options: Options) -> InputParams:
    truncate = options.get("truncate")
    params: Any = {name: value for name, value in options.items() if name not in ("truncate", "priority", "progress")}
    limit = -1 if truncate is True else None if truncate is False else truncate
    return InputParams(truncate_to=limit, refuses_longer=truncate is False, **params)


def _strings(name: str, texts: Texts) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} must be a list of strings, not of type {type(texts).__name__}.")
    strings = list(texts)
    for index, text in enumerate(strings):
        if not isinstance(text, str):
            raise TypeError(f"{_place(name, index)} must be a string, not of type {type(text).__name__}.")
    return strings


def _place(name: str, index: int) -> str:
    return name if name == "query" else f"{name}[{index}]"


@contextmanager
def _named_inputs(inputs: Mapping[str, list[str]], begin: int = 0) -> Iterator[None]:
    """Name the input, or the option of this module, that an error is about; its texts begin at ``begin``."""
    try:
        yield
    except InputError as error:
        names = {"truncate_to": "truncate"}
        if (place := error.place) is not None:
            name, texts = [*inputs.items()][place.field == "documents"]
            index = (place.index or 0) + (begin if len(texts) > 1 else 0)
            names[place.field] = _place(name, index)
            error.place = evolve(place, index=None)
        raise type(error)(error.message_with(names.get), param=error.param or error.field) from None


async def _compute_windows(
    inputs: Mapping[str, list[str]], most_rows: int, compute: Callable[[slice], Awaitable[None]], options: Options
) -> None:
    """Compute windows of at most ``most_rows`` of the last input, several at a time, and show the progress."""
    rows = len([*inputs.values()][-1])
    size, is_shown = max(1, min(most_rows, CALL_WINDOW_TEXTS)), options.get("progress")
    begins: Iterable[int] = range(0, rows, size)
    if is_shown or (is_shown is None and rows > size and sys.stderr.isatty()):
        begins = track(begins, "", console=Console(stderr=True))
    with closing(begin for begin in begins) as windows, unwrap_exception_groups(PoolServeError):

        async def compute_some() -> None:
            for begin in windows:
                with _named_inputs(inputs, begin):
                    await compute(slice(begin, begin + size))

        async with trio.open_nursery() as nursery:
            for _ in range(CALL_WINDOWS):
                nursery.start_soon(compute_some)
