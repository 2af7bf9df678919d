"""The classes for ``map_batches``, called as an actor calls them, with real models and without a cluster."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import trio

from tests.bulk.test_commands import CASES, ROWS, read_rows, run, write_rows
from tests.models.model_families import HIDDEN, WORDS, write_family
from tests.models.retrieval_families import splade_max
from trio_pool_serve import EngineDeadError, ModelLoadError, ray_data
from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TextOptions
from trio_pool_serve.bulk.own_engine import OwnEngine
from trio_pool_serve.errors import BulkInputError, InvalidRequestError
from trio_pool_serve.ray_data.actor_engine import EngineOptions
from trio_pool_serve.runs.tables.input_rows import InputRow

CPU: Any = {"model_dtype": "float32", "device": "cpu", "backend": "torch"}

CLASSES: dict[str, Callable[..., Any]] = {
    "embed": ray_data.Embed,
    "token-embed": ray_data.TokenEmbed,
    "sparse": ray_data.Sparse,
    "classify": ray_data.Classify,
    "score": ray_data.Score,
    "rerank": ray_data.Rerank,
}

TOO_LONG = "word " * 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("ray") / "model", "bert"))


@pytest.fixture(scope="module")
def embed(model: str) -> Iterator[ray_data.Embed]:
    embed = ray_data.Embed(model, **CPU)
    yield embed
    embed.close()


@pytest.mark.parametrize(("task", "write", "column"), CASES, ids=[case[0].task for case in CASES])
def test_each_class_gives_what_the_bulk_command_gives(tmp_path: Path, task, write, column):
    folder, source = str(write(tmp_path / "model")), write_rows(tmp_path / "rows.jsonl")
    assert trio.run(lambda: run(source, tmp_path / "out.jsonl", task, model=folder)) == 0
    options = {} if task.top_n is None else {"top_n": task.top_n}
    compute = CLASSES[task.task](folder, *task.columns, truncate=True, **options, **CPU)
    given = pa.Table.from_pylist(ROWS)
    computed = compute(given)
    compute.close()
    assert computed.select(given.column_names) == given
    assert computed["error"].null_count == len(ROWS)
    expected = read_rows(tmp_path / "out.jsonl")
    for name in set(expected[0]) - {"id"}:
        written = pa.array([row[name] for row in expected], computed.schema.field(name).type)
        assert computed[name].combine_chunks() == written, name
    assert column in computed.column_names


BAD = [None, TOO_LONG, "", 7, b"bytes", ["a list"]]


def test_rows_that_fail_have_their_reason_and_others_their_vectors(embed):
    texts = [*WORDS[:3], *BAD, *WORDS[3:6]]
    batch = {"text": np.array([*texts, None], object)[:-1], "number": np.arange(len(texts))}
    computed = embed(batch)
    errors, vectors = computed["error"].to_pylist(), computed["embedding"]
    assert vectors.type == pa.list_(pa.float32(), HIDDEN)
    assert computed["number"].to_pylist() == list(range(len(texts)))
    failed = [row for row, error in enumerate(errors) if error is not None]
    assert failed == [row for row in range(3, 9) if row != 5]  # an empty text is one
    assert failed == [row for row, vector in enumerate(vectors.to_pylist()) if vector is None]
    assert errors[3] == "The column 'text' is null."
    assert "maximum context length" in errors[4]
    assert errors[6] == errors[7] == errors[8] == "The value of the column text is not a text."
    good = [row for row in range(len(texts)) if row not in failed]
    alone = embed(pa.table({"text": [texts[row] for row in good]}))["embedding"].to_pylist()
    assert np.allclose([vectors[row].as_py() for row in good], alone, rtol=0, atol=1e-6)


def dictionary(*indices: int) -> pa.Array:
    """A column whose values are ``WORDS``; Arrow does not check the indices."""
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(WORDS[:2]), safe=False)


COLUMNS_WITH_ONE_VALUE_THAT_PYTHON_HAS_NOT = {
    "a time after the year 9999": pa.array([5, 2**62], pa.timestamp("us")),
    "a date after the year 9999": pa.array([5, 2**31 - 1], pa.int32()).view(pa.date32()),
    "a duration of more than 32 bits of days": pa.array([5, 2**62], pa.duration("s")),
    "an index that is not in its dictionary": dictionary(1, 9),
    "a list with an index that is not in its dictionary": pa.ListArray.from_arrays([0, 1, 2], dictionary(1, 9)),
    "a time in a dictionary": pa.array([5, 2**62], pa.timestamp("us")).dictionary_encode(),
    "a time in a list": pa.array([[5], [2**62]], pa.list_(pa.timestamp("us"))),
    "a time in a struct": pa.array([{"a": 5}, {"a": 2**62}], pa.struct([("a", pa.timestamp("us"))])),
}


@pytest.mark.parametrize("column", COLUMNS_WITH_ONE_VALUE_THAT_PYTHON_HAS_NOT)
def test_a_value_that_python_has_not_is_the_error_of_its_row_alone(embed, column):
    given = COLUMNS_WITH_ONE_VALUE_THAT_PYTHON_HAS_NOT[column]
    computed = embed(pa.table({"text": given}))
    assert computed["text"].combine_chunks().equals(pa.chunked_array([given]).combine_chunks())
    other, error = computed["error"].to_pylist()
    assert other == (None if column.startswith("an index") else "The value of the column text is not a text.")
    assert error.startswith("The value of the column 'text' cannot be read: ")


class RaisesWhenRead:
    """An object whose pickle cannot be read, for a reason that is no text to Arrow."""

    def __reduce__(self) -> Any:
        return _raise, ("\ud800",)


def _raise(reason: str) -> None:
    raise LookupError(reason)


def test_a_pickled_object_that_cannot_be_read_is_the_error_of_its_row_alone(embed):
    texts = np.array([WORDS[0], RaisesWhenRead(), None, WORDS[1]], object)
    computed = embed({"text": texts})
    assert computed["error"].to_pylist() == [
        None,
        "The value of the column 'text' cannot be read: ?",
        "The column 'text' is null.",
        None,
    ]


def test_batches_of_all_formats_give_the_same(embed):
    table = pa.table({"text": WORDS[:4], "image": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]])})
    expected = embed(table)["embedding"]
    as_numpy = {"text": np.array(WORDS[:4], object), "image": np.arange(8).reshape(4, 2)}
    assert embed(as_numpy)["embedding"] == expected
    assert embed(as_numpy)["image"][3].as_py().tolist() == [6, 7]
    assert embed(pd.DataFrame({"text": WORDS[:4]}))["embedding"] == expected


def test_an_empty_batch_has_the_columns(embed):
    computed = embed(pa.table({"text": pa.array([], pa.string())}))
    assert (computed.num_rows, computed.column_names) == (0, ["text", "embedding", "error"])


def test_more_rows_than_a_window_has_keep_their_order(embed):
    rows = [WORDS[number % len(WORDS)] for number in range(2500)]
    vectors = np.stack(embed(pa.table({"text": rows}))["embedding"].to_pylist())
    assert np.allclose(vectors, np.tile(vectors[: len(WORDS)], (2500 // len(WORDS) + 1, 1))[:2500], rtol=0, atol=1e-6)


def test_a_batch_without_the_column_or_with_the_new_one_is_refused(embed):
    with pytest.raises(BulkInputError, match=r"No column 'text'. The columns are: 'body'"):
        embed(pa.table({"body": ["a"]}))
    with pytest.raises(BulkInputError, match=r"A column 'error' exists already.*`prefix`"):
        embed(pa.table({"text": ["a"], "error": ["b"]}))


def test_a_prefix_is_for_all_new_columns(model):
    embed = ray_data.Embed(model, "body", prefix="body_", dimensions=8, dtype="int8", **CPU)
    computed = embed(pa.table({"body": ["a"], "error": ["b"]}))
    embed.close()
    assert computed.column_names == ["body", "error", "body_embedding", "body_error"]
    assert computed["body_embedding"].type == pa.list_(pa.int8(), 8)


WRONG = [
    ({"dimensions": 0}, InvalidRequestError, "dimensions must be from 1 to"),
    ({"dimensions": 12, "dtype": "binary"}, BulkInputError, "multiple of 8"),
    ({"dtype": "int4"}, ValueError, r"^'dtype' must be in \('float32', .*\(got 'int4'\)$"),
    ({"input_type": "question"}, ValueError, "^'input_type' must be in"),
    ({"prompt_name": "search"}, InvalidRequestError, "prompt_name 'search' is not a prompt"),
    ({"device": "tpu"}, ValueError, "--device: `tpu` is not auto, cpu, cuda or cuda:N"),
    ({"max_model_len": -1}, ValueError, "--max-model-len must be more than 0, not -1"),
    ({"dimension": 8}, TypeError, "Unknown option dimension; accepted: prompt_name"),
    ({"column": 3}, TypeError, "3 is not a name of a column"),
    ({"model": ""}, ValueError, "pass a local folder or the id of a model"),
    ({"model": "/no/such/folder"}, ModelLoadError, "/no/such/folder"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_wrong_options_are_refused_by_the_constructor(model, wrong, kind, message):
    with pytest.raises(kind, match=message):
        ray_data.Embed(**{"model": model, **CPU, **wrong})


def test_the_options_are_those_of_the_bulk_commands():
    of_commands = {option.name for kind in (OwnModelOptions, TextOptions) for option in attrs.fields(kind)}
    assert set(EngineOptions.__annotations__) == of_commands


def test_a_model_that_cannot_do_the_task_is_refused_by_the_constructor(tmp_path):
    with pytest.raises(InvalidRequestError, match="embed"):
        ray_data.Embed(str(splade_max(tmp_path / "model")), **CPU)
    with pytest.raises(ValueError, match="must be at least 1"):
        ray_data.Rerank("model", top_n=0)


@pytest.fixture
def new_threads() -> Iterator[Callable[[], set[threading.Thread]]]:
    """Returns the threads that a test has started, which must end with it; trio ends idle ones after ten seconds."""
    before = set(threading.enumerate())

    def since() -> set[threading.Thread]:
        started = set(threading.enumerate()) - before
        return {thread for thread in started if thread.name != "tqdm_monitor"}  # of loading; the process has one

    yield since
    gc.collect()
    for thread in since():
        thread.join(30)
    assert since() == set()


@pytest.mark.parametrize("end", ["close", "last reference"])
def test_all_threads_end_with_the_object(model, new_threads, end):
    embed = ray_data.Embed(model, **CPU)
    embed(pa.table({"text": WORDS[:4]}))
    assert {"ray-data", "launch"} <= {thread.name for thread in new_threads()}
    if end == "close":
        embed.close()


@pytest.mark.usefixtures("new_threads")
def test_a_constructor_that_fails_leaves_no_threads(model):
    with pytest.raises(InvalidRequestError):
        ray_data.Embed(model, dimensions=9999, **CPU)


def test_after_an_engine_has_died_the_model_is_loaded_again(model, caplog):
    embed = ray_data.Embed(model, **CPU)
    table = pa.table({"text": WORDS[:4]})
    expected = embed(table)

    async def die(engine: OwnEngine) -> None:
        # The engine's own code raises when it takes its next batch.
        engine.service.models.find().engine.queue.dispatcher.on_computed = object()
        await engine.compute([InputRow(0, "", 0, ("a",))])
        await trio.sleep_forever()

    with pytest.raises(EngineDeadError):
        embed._call(die)
    assert embed._loop._ended.wait(30)
    assert embed(table) == expected
    assert "is loaded again" in caplog.text
    embed.close()
