"""Tokenizers from the cache: equal to what transformers makes, and read without it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import pre_tokenizers
from transformers import ByT5Tokenizer

from tests.model_folders import write_json, write_late_interaction_folder, write_scripted_folder
from tests.models.classifier_families import reranker_tokenizer
from tests.models.model_families import (
    bert_tokenizer,
    deberta_tokenizer,
    distilbert_tokenizer,
    gemma_tokenizer,
    modernbert_tokenizer,
    mpnet_tokenizer,
    qwen3_tokenizer,
    roberta_tokenizer,
    t5_tokenizer,
    write_family,
    xlm_roberta_tokenizer,
)
from tests.models.retrieval_families import add_to, bert_with_unused
from tests.models.test_vocabulary import write_sentencepiece
from tests.models.vision_families import (
    clip_tokenizer,
    qwen_vl_tokenizer,
    write_siglip2_tokenizer,
    write_siglip_tokenizer,
)
from tests.rendering.chat.chat_folders import CHATML, TURNS, write_chat_folder
from tests.rendering.text.test_tokenizer import TEXTS, model_folder
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading import tokenizer_loading
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.converter import ConversionJob
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import PairPrompt, RenderingParams
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat, chat_pair
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.storage.model_cache import ModelCache

MARKED = ("[Q] ", "[unused0]", "[unused1] ", "?")

BUILDERS: dict[str, Callable[[], Any]] = {
    "bert": bert_tokenizer,
    "bert with markers": bert_with_unused,
    "roberta": roberta_tokenizer,
    "distilbert": distilbert_tokenizer,
    "mpnet": mpnet_tokenizer,
    "xlm-roberta": xlm_roberta_tokenizer,
    "more tokens": lambda: add_to(xlm_roberta_tokenizer(), "[QueryMarker]", "W"),
    "t5": t5_tokenizer,
    "modernbert": modernbert_tokenizer,
    "qwen3": qwen3_tokenizer,
    "qwen-vl": qwen_vl_tokenizer,
    "reranker": lambda: reranker_tokenizer(CHATML),
    "gemma": gemma_tokenizer,
    "deberta": deberta_tokenizer,
    "clip": clip_tokenizer,
}
FAMILIES = ["minilm", *BUILDERS, "siglip2", "chat", "chat in files"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        path = root / name
        if name == "minilm" or path.exists():
            return minilm if name == "minilm" else path
        if name == "siglip2":
            write_siglip2_tokenizer(path)
        elif name == "chat":
            write_chat_folder(path, [{"name": "default", "template": CHATML}, {"name": "other", "template": TURNS}])
            write_json(path / "config.json", {"model_type": "qwen3"})
        elif name == "chat in files":
            write_chat_folder(path, TURNS)
            write_json(path / "config.json", {"model_type": "qwen3"})
            (path / "chat_template.jinja").write_text(CHATML)
            (path / "additional_chat_templates").mkdir()
            (path / "additional_chat_templates" / "turns.jinja").write_text(TURNS)
        else:
            BUILDERS[name]().save_pretrained(path)
        return path

    return folder


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def facts(tokenizer: FastTokenizer) -> dict[str, Any]:
    """All that a tokenizer tells of some texts, and of itself."""
    found: dict[str, Any] = {
        "special": {index for index in range(3000) if tokenizer.is_special(index)},
        "names": tokenizer._named_ids,
        "segments": tokenizer._has_segments,
        "side": tokenizer.truncation_side,
        "counts": (tokenizer.special_tokens, tokenizer.pair_special_tokens),
        "chat": tokenizer.chat,
        "vocabulary": tokenizer._backend.get_vocab(),
        "splits": tokenizer._backend.encode_special_tokens,
    }
    special = " ".join(dict.fromkeys(tokenizer.chat.special_tokens.values()))
    for text in (*TEXTS, f"a {special}b{special}", " [unused0] [Q] hello [unused1]? ?W"):
        encoded = tokenizer.encode(text)
        found[text] = [(encoded.ids, encoded.offsets, encoded.type_ids, encoded.special_tokens_mask)]
        for adds in (True, False):
            found[text] += [
                tokenizer.tokens(text, add_special_tokens=adds),
                tokenizer.finish(tokenizer.encode(text), 7, "left", add_special_tokens=adds).tolist(),
                [
                    part.tolist()
                    for part in tokenizer.finish_with_positions(encoded, 9, "right", add_special_tokens=adds)
                ],
                tokenizer.decode(encoded.ids, skip_special_tokens=adds),
            ]
            ids, segments = tokenizer.join(tokenizer.encode(text), tokenizer.encode("pair"), add_special_tokens=adds)
            found[text] += [ids.tolist(), None if segments is None else segments.tolist()]
    if tokenizer.chat.templates:
        messages = [{"role": "user", "content": "hello"}]
        found["rendered"] = tokenizer.chat.render(messages, {"add_generation_prompt": True, "enable_thinking": False})
    return found


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing is loaded by transformers."""

    def forbid() -> None:
        monkeypatch.setattr(tokenizer_loading, "import_transformers", lambda: pytest.fail("it is not in the cache"))

    return forbid


NEEDS_TRANSFORMERS = ("bert with markers", "t5", "qwen-vl", "gemma", "deberta", "clip", "siglip2")


@pytest.mark.parametrize("lower_case", [False, True], ids=["as is", "lower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_of_the_cache_and_one_of_the_files_alone_are_the_one_that_was_loaded(
    folders, cache, no_transformers, monkeypatch, family, lower_case
):
    folder = model_folder(folders(family), lower_case=lower_case)
    folder = attrs.evolve(folder, spec=attrs.evolve(folder.spec, marker_tokens=MARKED))
    uncached = load_tokenizer(folder)
    first = load_tokenizer(folder, cache=cache)
    no_transformers()
    cached = load_tokenizer(folder, cache=cache)
    assert isinstance(cached, FastTokenizer)
    assert facts(cached) == facts(uncached) == facts(first)
    if family not in NEEDS_TRANSFORMERS:
        monkeypatch.setattr(tokenizer_loading, "_versions", lambda: {"tokenizers": "9"})
        assert facts(load_tokenizer(folder)) == facts(uncached)


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "tokenizer_config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value != "absent"}
        write_json(path / "tokenizer_config.json", kept)

    return edit


ROLES = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("template", [ROLES, [{"name": "default", "template": ROLES}]], ids=["one", "named"])
@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.json"])
def test_pairs_and_conversations_have_a_processor_s_template(folders, cache, tmp_path, name, template):
    path = shutil.copytree(folders("reranker"), tmp_path / "model")
    write_json(path / name, {"chat_template": template})
    for _ in range(2):
        tokenizer = load_tokenizer(model_folder(path), cache=cache)
        assert tokenizer.chat.templates == {"default": ROLES}
        pair = chat_pair(ChatFormat(structured=False, options={}), tokenizer)
        rendered = pair.render(tokenizer, PairPrompt("a", "b"), RenderingParams(), 64)
        expected = tokenizer.encode("<query>a<document>b").ids
        assert rendered.token_ids.tolist() == expected


def test_an_entry_is_of_the_files_and_of_what_is_done_to_the_tokenizer(folders, cache, tmp_path):
    path = shutil.copytree(folders("bert"), tmp_path / "model")
    folder = model_folder(path)
    load_tokenizer(folder, cache=cache)
    load_tokenizer(folder, cache=cache)
    assert len(cache.entries()) == 1
    moved = shutil.copytree(path, tmp_path / "moved")
    load_tokenizer(model_folder(moved), cache=cache)
    (path / "model.safetensors").write_bytes(b"weights")
    load_tokenizer(folder, cache=cache)
    assert len(cache.entries()) == 1
    load_tokenizer(attrs.evolve(folder, lower_case=True), cache=cache)
    load_tokenizer(attrs.evolve(folder, chat_template="{{ messages }}"), cache=cache)
    load_tokenizer(attrs.evolve(folder, spec=attrs.evolve(folder.spec, marker_tokens=("[UNK]x",))), cache=cache)
    edited(truncation_side="left")(path)
    assert load_tokenizer(folder, cache=cache).truncation_side == "left"
    assert len(cache.entries()) == 5


@pytest.mark.parametrize(("installed", "hits"), [({"transformers": "9"}, False), ({}, True)], ids=["other", "none"])
def test_other_versions_make_it_anew_and_none_reads_what_is_there(folders, cache, monkeypatch, installed, hits):
    folder = model_folder(folders("roberta"))
    expected = load_tokenizer(folder, cache=cache).encode("hello world").ids
    monkeypatch.setattr(tokenizer_loading, "_versions", lambda: {**installed, "tokenizers": "9"})
    imported = []
    monkeypatch.setattr(tokenizer_loading, "import_transformers", lambda: imported.append(1))
    assert load_tokenizer(folder, cache=cache).encode("hello world").ids == expected
    assert imported == [1] * (not hits)


def test_a_conversion_leaves_the_tokenizer_in_the_cache(cache, no_transformers, tmp_path):
    path = write_family(tmp_path / "model", "bert")
    config = ModelConfig(device="cpu", cache_dir=str(cache.folder))
    kind = model_folder(path).kind
    load_to_convert(ConversionJob(str(path), config, [], kind.load, may_time=False))
    no_transformers()
    assert isinstance(load_tokenizer(read_model_folder(path, config), cache=cache), FastTokenizer)


@pytest.mark.parametrize("write", [ByT5Tokenizer().save_pretrained, write_siglip_tokenizer], ids=["byt5", "siglip"])
def test_a_tokenizer_written_in_python_is_not_cached(cache, tmp_path, write):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    assert isinstance(load_tokenizer(model_folder(tmp_path / "model"), cache=cache), SlowTokenizer)
    assert cache.entries() == []


def test_a_tokenizer_with_a_part_written_in_python_is_loaded_and_not_cached(cache, folders, monkeypatch, caplog):
    adapted = tokenizer_loading._adapted

    class Halves:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: [part[:1], part[1:]])

    def with_python(backend: Any, folder: Any) -> Any:
        backend = adapted(backend, folder)
        backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Halves())
        return backend

    monkeypatch.setattr(tokenizer_loading, "_adapted", with_python)
    assert isinstance(load_tokenizer(model_folder(folders("bert")), cache=cache), FastTokenizer)
    assert cache.entries() == []
    assert "is not cached" in caplog.text


PROGRAM = """
import sys
from pathlib import Path

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.renderer_loading import renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.threads.offload import Offload

offload, processes = Offload(), {"template": WorkerProcesses(1)}
for path in sys.argv[2:]:
    folder = open_model_folder(path, ModelConfig())
    tokenizer = load_tokenizer(folder, cache=ModelCache(Path(sys.argv[1])))
    templates = ChatTemplates(processes, offload)
    renderer = renderer_of(folder, tokenizer, offload, workers=1, templates=templates)
    renderer.texts.render(TextPrompt("hello world"), RenderingParams())
    renderer.texts.render(PairPrompt("hello", "world"), RenderingParams())
print(len(sys.argv), *sorted({"transformers", "torch", "huggingface_hub", "sentencepiece"} & {*sys.modules}))
"""


def test_a_process_with_a_warm_cache_renders_without_transformers_and_torch(minilm, cache, tmp_path):
    paths = [
        minilm,
        write_scripted_folder(tmp_path / "scripted"),
        write_late_interaction_folder(tmp_path / "late"),
        write_chat_folder(tmp_path / "chat", CHATML),
        write_sentencepiece(tmp_path / "alone", "xlm-roberta"),
    ]
    program = [sys.executable, "-c", PROGRAM, str(cache.folder), *map(str, paths)]
    for path in paths:
        load_tokenizer(read_model_folder(path), cache=cache)
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == [str(len(paths) + 2)], done.stderr


SAID = {
    "no file": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
    "no list of tokens": (lambda path: write_json(path / "tokenizer.json", {"added_tokens": 1}), "cannot be read"),
    "a class of its own": (edited(tokenizer_class="DebertaV2Tokenizer"), "tokenizer_class is DebertaV2Tokenizer"),
    "no class": (edited(tokenizer_class="absent"), "tokenizer_class is None"),
    "a name left out": (edited(sep_token="absent"), "name no sep_token"),
    "an ordinary token": (edited(extra_special_tokens=["w"]), "does not add w"),
    "a token that is not there": (edited(mask_token="[OTHER]"), r"does not add \[OTHER\]"),
    "a name of its own": (edited(image_token="[UNK]"), "names other tokens: image_token"),
    "names for more tokens": (edited(extra_special_tokens={"image": "[UNK]"}), "gives names to extra_special_tokens"),
    "other case": (edited(do_lower_case=False), "differ in do_lower_case"),
    "tokens that are added": (edited(added_tokens_decoder={"7": {"content": "a"}}), "add different tokens"),
}


@pytest.mark.parametrize(("edit", "said"), SAID.values(), ids=SAID)
def test_what_the_files_leave_open_is_refused_with_the_reason_and_the_remedy(
    folders, no_transformers, monkeypatch, tmp_path, edit, said
):
    path = shutil.copytree(folders("bert"), tmp_path / "model")
    edit(path)
    no_transformers()
    monkeypatch.setattr(tokenizer_loading, "_versions", dict)
    with pytest.raises(ModelLoadError, match=f"{said}.*pip install transformers"):
        load_tokenizer(model_folder(path))


@pytest.mark.parametrize("changes", [{"truncation_side": "left"}, {"model_input_names": ["input_ids"]}])
def test_settings_of_the_files_hold_from_the_cache_and_without_transformers(
    folders, cache, monkeypatch, tmp_path, changes
):
    path = shutil.copytree(folders("bert"), tmp_path / "model")
    edited(**changes, split_special_tokens=True, additional_special_tokens=["[MASK]"])(path)
    expected = facts(load_tokenizer(model_folder(path), cache=cache))
    assert expected["splits"]
    assert facts(load_tokenizer(model_folder(path), cache=cache)) == expected
    monkeypatch.setattr(tokenizer_loading, "_versions", dict)
    assert facts(load_tokenizer(model_folder(path))) == expected


def test_a_class_that_transformers_replaces_is_refused_without_it(folders, monkeypatch):
    monkeypatch.setattr(tokenizer_loading, "_versions", dict)
    folder = attrs.evolve(model_folder(folders("chat")), transformer_config={"model_type": "qwen2"})
    with pytest.raises(ModelLoadError, match="Qwen2Tokenizer"):
        load_tokenizer(folder)
