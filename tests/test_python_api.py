"""Models in the caller's process: ``open_model`` and ``Model``."""

import gc
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.api.scripted_models import Everything, Judge, LateInteraction, serve_as
from tests.bulk.test_commands import CASES, ROWS, VALUES, WORDS
from tests.conftest import client_of, full_queue, listening, until, wait_idle
from tests.end_to_end.folder_over_http import AskedFolder
from tests.model_folders import VOCABULARY
from tests.models.classifier_families import write_classifier, write_reranker
from tests.page_blocks import blocks_of
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import ROOT
from trio_pool_serve import EngineDeadError, InvalidRequestError, Model, ModelLoadError, process_setup, python_api
from trio_pool_serve.errors import ContextLengthError, NotFiniteError, RunnerDeadError, TaskNotSupportedError
from trio_pool_serve.python_api import AsyncModel, open_model
from trio_pool_serve.service import Service
from trio_pool_serve.tasks import pool
from trio_pool_serve.types import Batch, CopiedBatch

IN_FLOAT32: Any = {"dtype": "float32", "device": "cpu", "backend": "torch"}


# -- real models: the same numbers as over HTTP -------------------------------------------------------


async def rankings_of(model: AsyncModel) -> list[Any]:
    every = [await model.rerank(row["query"], row["documents"], top_n=2, truncate=True) for row in ROWS]
    return [([one.index for one in ranked], [one.score for one in ranked]) for ranked in every]


async def probabilities_of(model: AsyncModel) -> list[Any]:
    return list((await model.classify(WORDS, truncate=True)).probabilities)


async def weights_of(model: AsyncModel) -> list[Any]:
    return [(row.indices, row.values) for row in await model.sparse(WORDS, truncate=True)]


CALLS: dict[str, Callable[[AsyncModel], Any]] = {
    "embed": lambda model: model.embed(WORDS, truncate=True),
    "token-embed": lambda model: model.tokens(WORDS, truncate=True),
    "sparse": weights_of,
    "classify": probabilities_of,
    "score": lambda model: model.score(WORDS[0], WORDS, truncate=True),
    "rerank": rankings_of,
}


@pytest.mark.parametrize(("task", "write", "column"), CASES, ids=[case[0].task for case in CASES])
async def test_each_method_returns_what_the_server_responds(tmp_path: Path, task, write, column):
    async with (
        open_model(write(tmp_path / "model"), **IN_FLOAT32) as model,
        listening(model.service) as url,
        client_of(url) as client,
    ):
        ours = await CALLS[task.task](model)
        theirs = await VALUES[task.task](AskedFolder(client, model.service), task)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=0, atol=1e-5)


# -- a scripted model ---------------------------------------------------------------------------------


@pytest.fixture
def loading_scripted(monkeypatch: pytest.MonkeyPatch, scripted: ScriptedRunner) -> None:
    """Models are loaded by the scripted runner."""
    monkeypatch.setattr(process_setup, "Service", lambda config, gpus: Service(config, lambda *_: scripted, gpus=gpus))


@pytest.fixture
async def model(loading_scripted: None, scripted_folder: Path) -> AsyncIterator[AsyncModel]:
    async with open_model(scripted_folder, device="cpu") as model:
        serve_as(model.service, Everything())
        yield model


def last_row(runner: ScriptedRunner) -> list[str]:
    names = {number: word for word, number in VOCABULARY.items()}
    return [names[number] for number in runner.batches[-1].requests[-1].prompt.token_ids.tolist()]


async def test_shapes_and_types_of_the_results(model: AsyncModel):
    vectors = await model.embed(iter(["hello", "hello world"]), dimensions=4)
    assert (vectors.shape, vectors.dtype, vectors[:, 0].tolist()) == ((2, 4), np.float32, [3.0, 4.0])
    first, second = await model.tokens(["hello", "hello world"])
    assert (first.shape, second.shape, first.dtype) == ((3, 8), (4, 8), np.float32)
    (weights,) = await model.sparse(["hello hello"])
    ids = sorted(VOCABULARY[word] for word in ("[CLS]", "[SEP]", "hello"))
    assert (weights.indices.tolist(), weights.indices.dtype, weights.values.dtype) == (ids, np.int32, np.float32)
    classes = await model.classify(["hello", "hello world"])
    assert (classes.labels, classes.probabilities.shape) == (("no", "yes"), (2, 2))
    assert classes.probabilities.dtype == np.float32
    scores = await model.score(["hello", "world"], ["hello", "w1"])
    assert (scores.shape, scores.dtype) == ((2,), np.float32)
    ranked = await model.rerank("hello", ["w1 w2 w3", "hello", "hello"])
    assert [document.index for document in ranked] == [1, 2, 0]
    assert ranked == sorted(ranked, key=lambda document: -document.score)
    assert await model.rerank("hello", ["w1 w2 w3", "hello", "hello"], top_n=1) == ranked[:1]


async def test_no_texts_have_no_results(model: AsyncModel):
    assert (await model.embed([], dimensions=4)).shape == (0, 4)
    assert (await model.embed([])).shape == (0, 8)
    assert await model.tokens([]) == await model.sparse([]) == await model.rerank("hello", []) == []
    assert (await model.classify([])).probabilities.shape == (0, 2)
    assert (await model.score("hello", [])).shape == (0,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "[CLS] w1 w2 w3 [SEP]"),
        ({"prompt_name": "passage"}, "[CLS] passage : w1 w2 w3 [SEP]"),
        ({"input_type": "query"}, "[CLS] query : w1 w2 w3 [SEP]"),
        ({"instruction": "hello : "}, "[CLS] hello : w1 w2 w3 [SEP]"),
        ({"truncate": 4}, "[CLS] w1 w2 [SEP]"),
        ({"truncate": 4, "truncation_side": "left"}, "[CLS] w2 w3 [SEP]"),
        ({"add_special_tokens": False}, "w1 w2 w3"),
    ],
)
async def test_options_decide_how_texts_are_rendered(model: AsyncModel, scripted: ScriptedRunner, options, expected):
    await model.embed(["w1 w2 w3"], **options)
    assert last_row(scripted) == expected.split()


async def test_the_priority_and_the_parameters_of_vectors_reach_the_engine(model: AsyncModel, scripted: ScriptedRunner):
    await model.embed(["hello"], dimensions=3, normalize=False, priority=-5)
    (request,) = scripted.batches[-1].requests
    assert (request.priority, request.params[0].dimensions, request.params[0].normalize) == (-5, 3, False)
    await model.classify(["hello"], activation="raw")
    assert scripted.batches[-1].requests[-1].params[0].activation == "raw"


LONG = "hello " * 100

Invalid, TooLong = InvalidRequestError, ContextLengthError

WRONG: list[tuple[Callable[[AsyncModel], Any], type[Exception], str]] = [
    (lambda m: m.embed("hello"), TypeError, r"^texts must be a list of strings, not of type str"),
    (lambda m: m.embed(["hello", None]), TypeError, r"^texts\[1\] must be a string, not of type NoneType"),
    (lambda m: m.rerank(b"hello", []), TypeError, "^query must be a string, not of type bytes"),
    (lambda m: m.score("hello", "hello"), TypeError, r"^texts_2 must be a list of strings"),
    (lambda m: m.embed(["a"], truncated=True), TypeError, r"^embed\(\) has no argument `truncated`; .* truncate\?$"),
    (lambda m: m.embed(text=["a"]), TypeError, r"^embed\(\) has no argument `text`; did you mean texts\?$"),
    (lambda m: m.embed(["a"], dimension=4), TypeError, r"`dimension`; did you mean dimensions\?$"),
    (lambda m: m.embed(["a"], truncate_dim=4), TypeError, r"`truncate_dim`; did you mean dimensions\?$"),
    (lambda m: m.embed(["a"], top_n=4), TypeError, "`top_n`; accepted: texts, dimensions, normalize, input_type, "),
    (
        lambda m: m.tokens(["a"], normalize=True),
        TypeError,
        r"^tokens\(\) has no argument `normalize`; accepted: texts,",
    ),
    (lambda m: m.rerank("a", ["b"], top_k=4), TypeError, r"^rerank\(\) has no argument `top_k`; did you mean top_n\?$"),
    (lambda m: m.score("a", text_2=["b"]), TypeError, r"^score\(\) has no argument `text_2`; did you mean texts_2\?$"),
    (lambda m: m.embed(["a"], priority=2**40), Invalid, "^priority must be an integer of 32 bits"),
    (lambda m: m.embed(["a"], truncate=3.5), Invalid, "^truncate must be True, False or a number"),
    (lambda m: m.embed(["a"], instruction=5), Invalid, "^instruction must be a string, not 5"),
    (lambda m: m.embed(["a"], dimensions="3"), Invalid, "^dimensions must be an integer, not '3'"),
    (lambda m: m.embed(["a"], normalize="x"), Invalid, "^normalize must be True or False"),
    (lambda m: m.score("a", ["b"], activation="z"), Invalid, "^activation must be 'probabilities'"),
    (lambda m: m.embed(["a", LONG]), TooLong, r"^texts\[1\] has 102 tokens\. .* is 64 tokens"),
    (lambda m: m.classify([LONG], truncate=False), TooLong, r"texts\[0\] has 102.*\(`truncate`\)"),
    (lambda m: m.rerank("a", ["b", LONG]), TooLong, r"documents\[1\] has 102 tokens"),
    (lambda m: m.rerank(LONG, ["b"]), TooLong, r"^query has 104 tokens"),
    (lambda m: m.score(["a", LONG], ["b", "c"]), TooLong, r"texts_1\[1\] has 104 tokens"),
    (lambda m: m.embed(["hello", "\ud800"]), Invalid, r"^texts\[1\] contains a lone surrogate"),
    (lambda m: m.embed(["hello"], dimensions=9), Invalid, "^dimensions must be from 1 to 8"),
    (lambda m: m.tokens(["hello"], dimensions=-1), Invalid, "^dimensions must be from 1 to 8"),
    (lambda m: m.embed(["hello"], truncate=65), Invalid, "^truncate must be -1 or from 1 to 64, not 65"),
    (lambda m: m.embed(["a"], input_type="a"), Invalid, "^input_type must be 'query' or"),
    (lambda m: m.embed(["a"], truncation_side=1), Invalid, "^truncation_side must be 'left' or"),
    (
        lambda m: m.embed(["a"], prompt_name="a"),
        Invalid,
        "^prompt_name 'a' is not a prompt of this model; its prompts: passage",
    ),
    (lambda m: m.rerank("a", ["b"], top_n=0), Invalid, "^top_n must be an integer of at least 1"),
    (lambda m: m.score(["a", "b"], ["c"]), Invalid, "^texts_1 contains 2 texts and texts_2 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
async def test_an_error_names_the_input_or_option_that_is_wrong(model: AsyncModel, call, error, message):
    with pytest.raises(error, match=message):
        await call(model)
    await wait_idle(model.service)
    assert len(await model.embed(["hello"])) == 1  # the model is as before


async def test_a_pair_that_is_too_long_is_named_by_its_second_text(model: AsyncModel):
    serve_as(model.service, Judge())
    with pytest.raises(ContextLengthError, match=r"documents\[1\] with its query has \d+ tokens"):
        await model.rerank("hello", ["hello", LONG])


async def test_a_text_whose_vector_is_not_finite_is_named(model: AsyncModel, scripted: ScriptedRunner):
    scripted.on_launch = lambda batch: CopiedBatch(
        [(np.full(8, np.nan if len(row.prompt.token_ids) == 4 else 1, np.float32),) for row in batch.requests]
    )
    with pytest.raises(NotFiniteError, match=r"output for texts\[1\] is not finite"):
        await model.embed(["hello", "hello world", "hello"])


async def test_a_task_that_the_model_does_not_support_is_refused_with_those_that_it_does(model: AsyncModel):
    serve_as(model.service, LateInteraction())
    for call in (model.embed(["a"]), model.sparse(["a"]), model.classify(["a"])):
        with pytest.raises(TaskNotSupportedError, match=r"Supported tasks of `.*`: score, token_embed"):
            await call


async def test_long_lists_are_computed_in_windows(model: AsyncModel, scripted: ScriptedRunner, monkeypatch, capfd):
    jobs: list[int] = []
    monkeypatch.setattr(python_api, "CALL_WINDOW_TEXTS", 10)
    monkeypatch.setattr(python_api, "CALL_WINDOWS", 2)

    async def counted(*args: Any) -> Any:
        jobs.append(len(args[1].prompts))
        running.add(id(args[1]))
        assert len(running) <= 2
        try:
            return await pool.pool(*args)
        finally:
            running.discard(id(args[1]))

    running: set[int] = set()
    monkeypatch.setattr(python_api, "pool", counted)
    texts = [" ".join(["hello"] * (1 + n % 7)) for n in range(35)]
    vectors = await model.embed(texts)
    assert vectors[:, 0].tolist() == [3 + n % 7 for n in range(35)]
    assert jobs == [10, 10, 10, 5]
    assert capfd.readouterr().err == ""  # not a terminal
    await model.embed(texts, progress=True)
    assert "100%" in capfd.readouterr().err
    scores = await model.score("hello", texts)
    assert scores[:7].tolist() == scores[7:14].tolist() == scores[28:].tolist()


async def test_vectors_of_tokens_are_computed_in_windows_of_a_bounded_size(model: AsyncModel, monkeypatch):
    monkeypatch.setattr(python_api, "MAX_TOKEN_NUMBERS", 2 * 64 * 8)
    monkeypatch.setattr(pool, "MAX_TOKEN_NUMBERS", 2 * 64 * 8)
    rows = await model.tokens([" ".join(["hello"] * 60)] * 5)
    assert [row.shape for row in rows] == [(62, 8)] * 5


async def test_results_do_not_keep_the_outputs_of_their_batches(model: AsyncModel):
    for value in (*await model.tokens(["hello"]), (await model.sparse(["hello"]))[0].values):
        assert value.base is None


async def test_calls_are_not_refused_however_much_waits(model: AsyncModel):
    with full_queue(model.service):
        assert len(await model.embed(["hello"] * 200)) == 200


# -- what the model is --------------------------------------------------------------------------------


async def test_a_model_says_what_its_entry_of_the_api_says(tmp_path: Path):
    folder = write_classifier(tmp_path / "model", "bert", id2label={0: "calm", 1: "glad"})
    async with (
        open_model(folder, **IN_FLOAT32) as model,
        listening(model.service) as url,
        client_of(url) as client,
    ):
        (entry,) = (await client.get("/v1/models")).json()["data"]
        info = (await client.get("/info")).json()
    assert (model.name, sorted(model.tasks)) == (entry["id"], sorted(entry["tasks"]))
    assert (model.max_model_len, model.fingerprint) == (entry["max_model_len"], entry["fingerprint"])
    assert [*model.labels] == [*info["model_type"]["classifier"]["id2label"].values()] == ["calm", "glad"]
    assert model.dimensions == 0


def test_a_blocking_model_says_what_it_is_also_once_it_is_closed(loading_scripted: None, scripted_folder: Path):
    model = Model(scripted_folder, device="cpu")
    vectors = model.embed(["hello"])
    model.close()
    assert (model.dimensions, model.max_model_len, model.labels) == (vectors.shape[1], 64, ())
    assert "embed" in model.tasks
    assert repr(model) == (
        f"Model(name='{scripted_folder}', tasks={model.tasks}, dimensions=8, max_model_len=64, labels=(), "
        f"fingerprint='{model.fingerprint}')"
    )


# -- opening and closing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dtyp": "float32"}, TypeError, r"has no argument `dtyp`; did you mean dtype\?$"),
        (
            {"model_kwargs": {}},
            TypeError,
            "has no argument `model_kwargs`; accepted: revision, trust_",
        ),
        ({"dtype": "float31"}, ValueError, "'dtype' must be in"),
        ({"max_model_len": -1}, ValueError, "^--max-model-len must be more than 0, not -1"),
        ({"max_batch_tokens": 0}, ValueError, "^--max-batch-tokens: `0` is not auto or a number"),
        ({"device": "cpu"}, ModelLoadError, "cannot be loaded: "),
    ],
)
async def test_wrong_settings_and_models_are_refused(tmp_path: Path, settings: Any, error, message):
    for opening in (lambda: open_model(tmp_path, **settings), lambda: Model(tmp_path, **settings)):
        with pytest.raises(error, match=message):
            async with opening():  # type: ignore[attr-defined]
                raise AssertionError("it was opened")


async def test_an_error_of_the_block_is_raised_as_it_is(loading_scripted: None, scripted_folder: Path):
    with pytest.raises(KeyError, match="mine"):
        async with open_model(scripted_folder, device="cpu"):
            raise KeyError("mine")


async def test_a_closed_model_computes_nothing(loading_scripted: None, scripted_folder: Path):
    async with open_model(scripted_folder, device="cpu") as model:
        pass
    with pytest.raises(EngineDeadError):
        await model.embed(["hello"])


async def test_an_engine_that_dies_ends_the_block(loading_scripted: None, scripted_folder: Path, scripted):
    def die(_: Batch) -> None:
        raise RunnerDeadError("lost")

    scripted.on_launch = die
    with pytest.raises(EngineDeadError, match="lost"):
        async with open_model(scripted_folder, device="cpu") as model:
            with pytest.raises(EngineDeadError):
                await model.embed(["hello"])
            await trio.sleep_forever()


async def test_opening_can_be_cancelled_at_any_step(loading_scripted: None, scripted_folder: Path):
    async def open_forever() -> None:
        async with open_model(scripted_folder, device="cpu"):
            await trio.sleep_forever()

    for steps in (0, 1, 2, 5, 20, 100):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_forever)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert scope.cancelled_caught


async def test_nothing_of_a_model_stays_once_it_is_closed(loading_scripted: None, scripted_folder: Path):
    before = trio.lowlevel.current_statistics().tasks_living
    async with open_model(scripted_folder, device="cpu") as model:
        await model.embed(["hello"] * 20)
        gone = weakref.ref(model.service)
    del model
    await until(lambda: gc.collect() is not None and gone() is None)  # threads are still ending
    assert trio.lowlevel.current_statistics().tasks_living == before


# -- code that blocks ---------------------------------------------------------------------------------


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "python-api"]


def test_a_blocking_model_has_the_methods_of_an_async_one_for_any_thread(loading_scripted: None, scripted_folder: Path):
    with Model(scripted_folder, device="cpu") as model, ThreadPoolExecutor(2) as threads:
        vectors = threads.map(lambda count: model.embed(["hello"] * count, dimensions=4), (1, 700))
        assert [each.shape for each in vectors] == [(1, 4), (700, 4)]
        assert model.score("hello", ["hello"]).shape == (1,)
        assert model.rerank("hello", ["w1", "hello"], top_n=1)[0].index == 1
        with pytest.raises(TaskNotSupportedError):
            model.sparse(["hello"])
        with pytest.raises(TypeError, match=r"texts\[0\]"):
            model.tokens([1])  # type: ignore[list-item]
        assert model.embed.__doc__ == AsyncModel.embed.__doc__
    with pytest.raises(RuntimeError, match="closed"):
        model.embed(["hello"])
    model.close()
    assert not loops()


def test_the_inputs_of_a_blocking_call_are_generated_in_its_thread(loading_scripted: None, scripted_folder: Path):
    threads = []

    def texts() -> Iterator[str]:
        yield "hello"
        threads.append(threading.current_thread())
        raise ValueError("of the caller")

    with Model(scripted_folder) as model:
        assert model.embed(iter(["hello"])).shape == (1, 8)
        with pytest.raises(ValueError, match="of the caller"):
            model.embed(texts())
    assert threads == [threading.main_thread()]


def test_a_forked_process_is_told_to_open_a_model_of_its_own(loading_scripted: None, scripted_folder: Path):
    with Model(scripted_folder) as model:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns that this process has threads
            child = os.fork()
        if child == 0:
            try:
                model.embed(["hello"])
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_blocking_model_is_closed_with_the_last_reference(loading_scripted: None, scripted_folder: Path):
    model = Model(scripted_folder, device="cpu")
    assert loops()
    del model
    gc.collect()
    assert not loops()


# -- the page -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_of_the_page_print_what_it_says(tmp_path: Path, minilm: Path, capsys):
    reranker = write_reranker(tmp_path / "reranker", minilm)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, compared = "", 0
    for block in blocks_of(ROOT / "docs/python.md"):
        if block.language == "python":
            source = block.text.replace("sentence-transformers/all-MiniLM-L6-v2", str(minilm))
            exec(source.replace("cross-encoder/ms-marco-MiniLM-L6-v2", str(reranker)), names)
            printed = capsys.readouterr().out
        else:
            assert (block.language, block.text) == ("text", printed)
            compared += 1
    assert compared == 2


def test_the_page_describes_every_option_and_setting():
    page = (ROOT / "docs/python.md").read_text()
    for name in (*python_api.Options.__annotations__, *process_setup.ModelSettings.__annotations__):
        assert f"`{name}`" in page, name
