"""Dense models with a Router: each text is computed by the route of its input type, as in sentence-transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from msgspec.structs import replace
from safetensors.torch import save_file

from tests.end_to_end.folder_over_http import Record, farthest, serving_folder
from tests.kept_folders import built_once, by_name
from tests.model_folders import write_json
from tests.models.model_families import (
    HIDDEN,
    MAX_LENGTH,
    TEXTS,
    ServedModel,
    dense,
    edit_json,
    reference,
    refuse,
    write_family,
)
from tests.models.retrieval_families import DOCUMENTS, QUERIES, assert_same_ranking
from tests.models.static_families import PROMPTS, WIDTH, write_static
from tests.server.server_process import launched
from trio_pool_serve.engine.batching import batch_key
from trio_pool_serve.engine.queue_entry import row_digest
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.models.files.folder_files import RouterFiles
from trio_pool_serve.prompts import RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.types import Batch, Embed, PoolingRequest

Routes = Mapping[str, Sequence[Any]]


def modules() -> Any:
    """sentence-transformers' modules; it saves the folders, too."""
    from sentence_transformers.sentence_transformer import modules as own

    return own


def table(folder: Path) -> Any:
    """A table that has the width of the transformers after a layer, and another tokenizer than theirs."""
    static = modules().StaticEmbedding.load(str(write_static(folder / "table")))
    return [static, modules().Dense(WIDTH, HIDDEN)]


def transformer(folder: Path, family: str, pooling: str = "mean") -> Any:
    path = write_family(folder / family, family)
    return [modules().Transformer(str(path), max_seq_length=MAX_LENGTH), modules().Pooling(HIDDEN, pooling)]


def save(folder: Path, routes: Routes, *shared: Any, **options: Any) -> Path:
    from sentence_transformers import SentenceTransformer

    router = modules().Router({name: list(route) for name, route in routes.items()}, **options)
    prompts = {**PROMPTS}
    SentenceTransformer(modules=[router, *shared], device="cpu", prompts=prompts).save(str(folder))
    return folder


@built_once
def table_for_queries(folder: Path) -> Path:
    sources = folder.with_name(f"{folder.name}-sources")
    routes = {"query": table(sources), "document": transformer(sources, "bert")}
    return save(folder, routes, modules().Normalize(), default_route="document")


@built_once
def two_transformers(folder: Path) -> Path:
    """As mdbr-leaf-ir-asym: two sizes, and without a layer after the Router. The first route is the default."""
    sources = folder.with_name(f"{folder.name}-sources")
    return save(folder, {"query": transformer(sources, "roberta"), "document": transformer(sources, "bert", "cls")})


@built_once
def mapped(folder: Path) -> Path:
    """Names of routes that only mappings know."""
    sources = folder.with_name(f"{folder.name}-sources")
    mappings = {("query", "text"): "small", (None, None): "large"}
    routes = {"small": table(sources), "large": transformer(sources, "bert")}
    return save(folder, routes, modules().Dense(HIDDEN, 12), route_mappings=mappings)


@built_once
def asym(folder: Path) -> Path:
    """The old name: config.json in place of router_config.json, which lists the same."""
    sources = folder.with_name(f"{folder.name}-sources")
    path = save(folder, {"query": transformer(sources, "bert"), "document": table(sources)})
    (path / "router_config.json").rename(path / "config.json")
    edit_json(path / "modules.json", lambda entries: entries[0].update(type="sentence_transformers.models.Asym"))
    return path


ROUTED = by_name(table_for_queries, two_transformers, mapped, asym)


@pytest.mark.parametrize("name", ROUTED)
async def test_values_and_scores_agree_over_http(name: str, tmp_path: Path, record_agreement: Record):
    path = ROUTED[name](tmp_path / name)
    theirs, texts, whole = reference(path), list(TEXTS), {"truncate_prompt_tokens": -1}
    queries, documents = theirs.encode_query(texts), theirs.encode_document(texts)
    short = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    expected = theirs.similarity(*short).numpy()
    async with serving_folder(path) as ours:
        first = await ours.embeddings(texts, input_type="query", **whole)
        differences = [
            farthest(first, queries),
            farthest(await ours.embeddings(texts, input_type="document", **whole), documents),
            farthest(await ours.embeddings(texts, **whole), theirs.encode(texts)),
            *[
                farthest(await ours.embeddings([text], input_type="query", **whole), queries[[row]])
                for row, text in enumerate(texts)
            ],
        ]
        found = await ours.scores_by_route(QUERIES, DOCUMENTS)
    assert np.abs(queries - documents).max() > 0.05, "agreement would prove nothing"
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    scores = max(farthest(rows, expected) for rows in found.values())
    assert max(differences) < 1e-5
    assert scores < 1e-4
    record_agreement(name, "embed", "SentenceTransformer", max(differences))
    record_agreement(name, "score", "SentenceTransformer", scores)


async def test_token_ids_and_windows_belong_to_the_route_of_their_input_type(tmp_path: Path):
    path = ROUTED["table_for_queries"](tmp_path / "model")
    ours, theirs = ServedModel(path), reference(path)
    text = "A nursery owns its tasks."
    for input_type, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        how = RenderingParams(input_type=input_type, instruction=PROMPTS[input_type])
        rendered = await ours.render(text, how)
        assert rendered.route == (input_type == "query"), "the transformer's route comes first"
        ids = TokensPrompt(rendered.token_ids.astype(np.int64))
        again = await ours.render(ids, RenderingParams(input_type=input_type))
        ((windows,),) = await ours.renderer.render_plain([(TextPrompt(text), how, True)])
        for prompt in (rendered, again, windows):
            assert prompt.route == rendered.route
            ((row,),) = await ours.runner.launch(Batch((PoolingRequest(prompt, (Embed(),)),)))
            assert np.abs(row - encode(text)).max() < 1e-5
    outside = TokensPrompt(np.array([ours.folder.routes[0].vocab_size]))  # which the table has
    await ours.render(outside, RenderingParams(input_type="query"))
    with pytest.raises(InvalidRequestError, match="this model's vocabulary has the ids 0 to"):
        await ours.render(outside, RenderingParams(input_type="document"))


async def test_a_request_s_maximum_is_that_of_its_route_and_rows_of_routes_are_not_computed_together(tmp_path: Path):
    ours = ServedModel(ROUTED["table_for_queries"](tmp_path / "model"))
    long = "A nursery owns its tasks. " * 40
    assert ours.folder.max_model_len == MAX_LENGTH
    whole = RenderingParams(truncate_to=MAX_LENGTH, input_type="query")
    query = await ours.render(long, whole)
    assert len(query.token_ids) > MAX_LENGTH
    document = await ours.render(long, evolve(whole, input_type="document"))
    assert len(document.token_ids) == MAX_LENGTH
    keys = {batch_key(PoolingRequest(prompt)) for prompt in (query, document)}
    digests = {row_digest(PoolingRequest(replace(query, route=route))) for route in (0, 1)}
    assert len(keys) == len(digests) == 2


async def test_texts_of_an_input_type_without_a_route_are_refused(tmp_path: Path):
    path = save_as(tmp_path, {"routes": ["query"], "allow_empty_key": False})
    ours = ServedModel(path)
    await ours.render("x", RenderingParams(input_type="query"))
    for input_type, said in ((None, "no input_type"), ("document", "the input_type 'document'")):
        with pytest.raises(InvalidRequestError, match=f"An input has {said}; this model accepts query"):
            await ours.render("x", RenderingParams(input_type=input_type))


def save_as(folder: Path, parameters: Any) -> Path:
    """Change the Router of a folder: its parameters, and the ``routes`` that are left."""
    path = ROUTED["two_transformers"](folder / "model")

    def edit(config: Any) -> None:
        kept = parameters.pop("routes", config["structure"])
        config["structure"] = {name: config["structure"][name] for name in kept}
        config["parameters"] = {"allow_empty_key": True} | parameters

    edit_json(path / "router_config.json", edit)
    return path


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"default_route": "else"}, "has no route 'else'"),
        ({"route_mappings": {"(None, 'text')": "else"}}, "has no route 'else'"),
        ({"route_mappings": {"(None, 'text')": ["query"]}}, "cannot be read"),
        ({"route_mappings": {"import os": "query"}}, "cannot be read"),
        ({"route_mappings": {"(None, None)": "query"}}, "route document of the Router is for neither queries"),
        ({"routes": []}, "0 transformers"),
        ({"temperature": 2}, "temperature is 2"),
    ],
    ids=str,
)
def test_routes_that_cannot_be_reached_or_read_are_refused(parameters: Any, said: str, tmp_path: Path):
    refuse(save_as(tmp_path, parameters), said)


def test_routes_with_vectors_of_different_lengths_are_refused_and_settings_that_cannot_be_obeyed(tmp_path: Path):
    path = ROUTED["two_transformers"](tmp_path / "model")
    refuse(path, "--backend openvino does not apply to a Router", backend="openvino")
    refuse(path, "apply only to embedding models", normalize=True)
    refuse(path, "support only embed, score", task="token_embed")
    layer = dense(HIDDEN, 8)
    write_json(path / "narrow" / "config.json", dict(layer.config))
    save_file(dict(layer.weights), path / "narrow" / "model.safetensors")

    def edit(config: Any) -> None:
        config["types"]["narrow"] = layer.type
        config["structure"]["query"].append("narrow")

    edit_json(path / "router_config.json", edit)
    refuse(path, "vectors of different lengths: 8, 32")


TASKS = (None, "query", "document", "else")


@pytest.mark.parametrize(
    ("routes", "mappings"),
    [
        (["query", "document"], {}),
        (["text"], {}),
        (["query", "text"], {(None, "image"): "query"}),
        (["a", "b", "c", "d"], {("query", "text"): "a", ("query", None): "b", (None, "text"): "c", (None, None): "d"}),
        (["a", "b", "c"], {("query", None): "b", (None, "text"): "c"}),
        (["a", "query"], {("document", None): "a"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("allow_empty_key", [True, False])
def test_routes_are_looked_up_as_in_sentence_transformers(routes: list[str], mappings: Any, *, allow_empty_key: bool):
    theirs = modules().Router(
        {name: [modules().Normalize()] for name in routes}, route_mappings=mappings, allow_empty_key=allow_empty_key
    )
    ours = RouterFiles(routes=dict.fromkeys(routes, ()), default_route=theirs.default_route, mappings=mappings)
    for task in TASKS:
        try:
            expected = theirs._resolve_route(task=task, modality="text")
        except ValueError:
            expected = None
        assert ours.route_of(task) == expected


@pytest.mark.slow
async def test_rows_of_routes_reach_an_engine_process(tmp_path: Path):
    path = ROUTED["table_for_queries"](tmp_path / "model")
    theirs = reference(path)
    async with launched(tmp_path, path, "--engine", "process", "--device", "cpu", "--dtype", "float32") as server:
        for input_type, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
            answer = await server.post({"input": ["Yes", "A nursery"], "input_type": input_type})
            vectors = [item["embedding"] for item in answer.json()["data"]]
            assert np.abs(vectors - encode(["Yes", "A nursery"])).max() < 1e-5
