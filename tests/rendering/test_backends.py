"""In a thread or in a process: the same prompts, the same results, the same errors."""

import os
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from attrs import evolve, frozen
from PIL.Image import Image
from trio.testing import wait_all_tasks_blocked

from tests.model_folders import write_late_interaction_folder, write_lookup_folder
from tests.process_gate import Gate
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.processes.worker_processes import WorkerProcesses, prepare_worker
from trio_pool_serve.prompts import PairPrompt, Prompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.media.decoding import prepare_process
from trio_pool_serve.rendering.process_backend import ProcessBackend
from trio_pool_serve.rendering.renderer import Renderer, renderer_of
from trio_pool_serve.rendering.text.text_loading import TextRecipe
from trio_pool_serve.rendering.text.tokenizer_loading import load_tokenizer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ImageFeatures, RenderedPrompt

TEXTS = ("", "hello", "hello world : " * 20, "Naïve café: größer, 東京, emoji 🙂!", "w1 " * 5000, "\ud83d")
PAIRS = (
    PairPrompt("hello", "world"),
    PairPrompt("hello " * 90, "world " * 10),
    PairPrompt("hello " * 900, "world", max_first_tokens=4, max_second_tokens=2),
    PairPrompt("", ""),
    PairPrompt("hello", "\udc00"),
)
PARAMS = tuple(
    RenderingParams(**settings)
    for settings in (
        {},
        {"truncate_to": 8},
        {"truncate_to": 8, "truncation_side": "left"},
        {"truncate_to": 1},
        {"add_special_tokens": False},
        {"instruction": "query : ", "truncate_to": 24},
        {"role": "query", "truncate_to": 40},
        {"role": "document", "max_text_tokens": 3},
    )
)


def renderers(root: Path, minilm: Path) -> dict[str, Renderer]:
    """A model with segments, one of late interaction, one that looks queries up; of one the files are not believed."""
    fixed = {"strategy": "fixed", "length": 6}
    paths = {
        "segments": (minilm, ModelConfig()),
        "shorter": (minilm, ModelConfig(max_model_len=20)),
        "late interaction": (
            write_late_interaction_folder(root / "late", {"skiplist_words": [":"]}, query_expansion=fixed),
            ModelConfig(),
        ),
        "lookup": (write_lookup_folder(root / "lookup", table_length=4), ModelConfig()),
    }
    made = {}
    for name, (path, loading) in paths.items():
        folder = read_model_folder(path, loading)
        recipe = TextRecipe(path, loading)
        made[name] = renderer_of(folder, load_tokenizer(folder), Offload(), workers=1, recipe=recipe)
    return made


@pytest.fixture(scope="module")
def threaded(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> dict[str, Renderer]:
    return renderers(tmp_path_factory.mktemp("models"), minilm)


@asynccontextmanager
async def in_processes(threaded: Mapping[str, Renderer], workers: int = 1) -> AsyncIterator[dict[str, Renderer]]:
    """The same renderers over processes that have loaded them."""
    prepare = partial(prepare_worker, *(renderer.texts for renderer in threaded.values()))
    processes = WorkerProcesses(workers, prepare)
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        await processes.start()
        backend = ProcessBackend(processes, processes)
        yield {name: Renderer(renderer.texts, renderer.offload, backend) for name, renderer in threaded.items()}
        nursery.cancel_scope.cancel(reason="the test is over")


def as_values(rendered: RenderedPrompt) -> dict[str, Any]:
    arrays = {"token_ids": rendered.token_ids, "type_ids": rendered.type_ids, "kept": rendered.kept}
    values = {name: None if array is None else (array.dtype, array.tolist()) for name, array in arrays.items()}
    return values | {"instruction_tokens": rendered.instruction_tokens, "attended": rendered.attended}


async def outcome_of(renderer: Renderer, prompt: Prompt, params: RenderingParams, *, windows: bool) -> Any:
    try:
        if windows:
            (read,) = await renderer.render_plain([(prompt, params, True)])
            return [as_values(window) for window in read]
        return as_values(await renderer.render(prompt, params))
    except InvalidRequestError as error:
        return type(error), str(error), error.param


def asked() -> Iterator[tuple[Prompt, RenderingParams, bool]]:
    for params in PARAMS:
        for text in TEXTS:
            yield TextPrompt(text), params, False
        for pair in PAIRS:
            yield pair, params, False
        yield TokensPrompt(np.arange(5, 80)), params, False
    for text in TEXTS:
        yield TextPrompt(text), RenderingParams(), True
        yield TextPrompt(text), RenderingParams(instruction="query : "), True


async def test_both_backends_make_the_same_of_every_prompt_and_refuse_it_in_the_same_words(threaded):
    seen: list[Any] = []
    async with in_processes(threaded) as processed:
        for name, in_thread in threaded.items():
            for prompt, params, windows in asked():
                expected = await outcome_of(in_thread, prompt, params, windows=windows)
                assert await outcome_of(processed[name], prompt, params, windows=windows) == expected, (name, prompt)
                seen.append(expected)
    refused = {outcome[0] for outcome in seen if isinstance(outcome, tuple)}
    assert refused == {ContextLengthError, InvalidRequestError}
    for value in ("type_ids", "kept", "attended"):
        assert any(outcome[value] is not None for outcome in seen if isinstance(outcome, dict)), value
    assert any(len(outcome) > 1 for outcome in seen if isinstance(outcome, list)), "no text had several windows"


async def test_tokens_go_to_text_and_back_alike(threaded):
    async with in_processes({"segments": threaded["segments"]}) as processed:
        for text in TEXTS[:-1]:
            tokens = [
                await renderer.tokenize(text, add_special_tokens=True)
                for renderer in (threaded["segments"], processed["segments"])
            ]
            assert tokens[0] == tokens[1]
            ids = np.array([token.id for token in tokens[0]])
            texts = [
                await renderer.detokenize(ids, skip_special_tokens=True)
                for renderer in (threaded["segments"], processed["segments"])
            ]
            assert texts[0] == texts[1]


async def test_token_ids_need_no_process(threaded):
    nobody = WorkerProcesses(1)
    renderer = evolve(threaded["segments"], backend=ProcessBackend(nobody, nobody))
    rendered = await renderer.render(TokensPrompt(np.array([101, 102])), RenderingParams())
    assert rendered.token_ids.tolist() == [101, 102]


# -- how it gets there --------------------------------------------------------------------------------


def test_a_renderer_travels_in_a_few_hundred_bytes_and_is_loaded_once(threaded):
    texts = threaded["segments"].texts
    work = pickle.dumps((texts.render, (TextPrompt("hello"), RenderingParams())), protocol=5)
    assert len(work) < 1500
    assert pickle.loads(pickle.dumps(texts)) is pickle.loads(pickle.dumps(texts))
    assert pickle.loads(pickle.dumps(threaded["shorter"].texts)) is not pickle.loads(pickle.dumps(texts))


def test_a_renderer_that_nobody_could_load_again_does_not_travel(threaded):
    with pytest.raises(TypeError, match="without a recipe"):
        pickle.dumps(evolve(threaded["segments"].texts, recipe=None))


TRIED: list[str] = []


@frozen
class NotedProcessor:
    key: str

    def __call__(self, image: Image) -> ImageFeatures:
        TRIED.append(f"{self.key} {image.mode}")
        return ImageFeatures({}, ())


def tried() -> list[str]:
    return TRIED


async def test_processes_for_images_have_tried_every_processor_before_the_first_image():
    processes = WorkerProcesses(1, partial(prepare_process, NotedProcessor("one"), NotedProcessor("another")))
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        assert await processes.call(tried) == ["one RGB", "another RGB"]
        nursery.cancel_scope.cancel(reason="the test is over")


# -- who waits ----------------------------------------------------------------------------------------


async def test_texts_and_images_do_not_wait_for_each_other(tmp_path: Path):
    gate = Gate.make(tmp_path / "gate")
    backend = ProcessBackend(render=WorkerProcesses(1), media=WorkerProcesses(3))
    assert backend.workers == 1
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.render.run)
        await nursery.start(backend.media.run)
        nursery.start_soon(backend.run, "render", gate)
        busy = await gate.wait_entered()
        assert await backend.run("media", os.getpid) not in (busy, os.getpid())
        await gate.let_go()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="the test is over")
