"""Static embeddings: what tables, tokenizers and settings change, and which folders are refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model_folders import write_json
from tests.models.model_families import (
    TEXTS,
    Module,
    ServedModel,
    dense,
    edit_json,
    layer_norm,
    pooling,
    refuse,
    write_modules,
)
from tests.models.static_families import (
    NEW_STATIC,
    POTION,
    STATIC,
    UNIT_LENGTH,
    WIDTH,
    static_reference,
    write_model2vec,
    write_static,
    write_tokenizer,
)
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.prompts import ChunkedPrompt, RenderingParams, TokensPrompt
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Embed, EmbedChunks, Vectors

UNKNOWN = "東京 🙂 A nursery ☃ owns"


def at_unit_length(vectors: Vectors) -> Vectors:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


async def test_a_text_without_tokens_gives_zeros_and_unknown_letters_count(tmp_path: Path):
    path = STATIC["static"](tmp_path / "model")
    ours, texts = ServedModel(path), ["", " ", UNKNOWN, "[CLS] Yes [SEP]"]
    rows = np.array(await ours.compute(texts))
    assert np.abs(rows - static_reference(path).encode(texts)).max() < 1e-5
    assert not rows[:2].any()
    assert np.abs(rows[2] - await ours.compute(["A nursery owns"])).max() > 0.1


async def test_dimensions_cut_the_vector_which_is_then_scaled_if_the_model_or_the_request_says_so(tmp_path: Path):
    for name in ("static", "potion"):
        path = STATIC[name](tmp_path / name)
        ours, texts = ServedModel(path), list(TEXTS)
        expected = static_reference(path).encode(texts)[:, :8]
        for normalize in (None, True):
            rows = np.array(await ours.compute(texts, Embed(dimensions=8, normalize=normalize)))
            is_scaled = normalize or name == "potion"
            assert np.abs(rows - (at_unit_length(expected) if is_scaled else expected)).max() < 1e-5


@pytest.mark.parametrize("normalize", [True, False])
async def test_the_setting_of_normalisation_replaces_the_files_and_the_default_prompt_is_a_prefix(
    tmp_path: Path, *, normalize: bool
):
    path = write_static(tmp_path / "model", UNIT_LENGTH, default_prompt_name="query")
    ((row,),) = await ServedModel(path, settings={"normalize": normalize}).values(["Yes"], Embed())
    plain = static_reference(write_static(tmp_path / "plain", default_prompt_name="query")).encode(["Yes"])
    assert np.abs(row - (at_unit_length(plain) if normalize else plain)[0]).max() < 1e-5


async def test_a_float16_table_gives_float32_whose_rounding_is_the_oracle_s(tmp_path: Path):
    path = write_static(tmp_path / "model", dtype=np.float16)
    rows, expected = np.array(await ServedModel(path).compute(TEXTS)), static_reference(path).encode(list(TEXTS))
    assert rows.dtype == np.float32
    assert expected.dtype == np.float16
    assert np.abs(rows - expected).max() < 8 * 2**-11  # half a step of float16 below 16


async def test_an_int8_table_is_averaged_without_a_scale_as_by_model2vec(tmp_path: Path):
    path = write_model2vec(tmp_path / "model", *POTION, dtype=np.int8)
    ours, tensors = ServedModel(path), load_file(path / "model.safetensors")
    for request in await ours.requests(["A nursery owns its tasks.", UNKNOWN]):
        ids = request.prompt.token_ids
        of_tokens = tensors["embeddings"][tensors["mapping"][ids]] * tensors["weights"][ids, None]
        (row,) = await ours.compute([TokensPrompt(ids.astype(np.int64))])
        assert np.abs(row - at_unit_length(of_tokens.mean(axis=0))).max() < 1e-6


async def test_a_chunk_of_a_document_is_the_mean_of_its_own_tokens(tmp_path: Path):
    path = STATIC["static_of_old"](tmp_path / "model")
    text, ours, theirs = "A nursery owns its tasks.", ServedModel(path), static_reference(path)
    (chunks,) = await ours.compute([ChunkedPrompt(text, ((2, 14), (10, 25), (0, 9)))], EmbedChunks(dimensions=8))
    expected = at_unit_length(theirs.encode(["nursery owns", "owns its tasks.", "A nursery"])[:, :8])
    assert np.abs(chunks - expected).max() < 1e-5


async def test_texts_may_be_as_long_as_the_server_allows_or_tokenizer_json_or_the_setting(tmp_path: Path):
    path = STATIC["static"](tmp_path / "model")
    ours, long = ServedModel(path), "a nursery " * 30_000
    (request,) = await ours.requests([long])
    table = load_file(path / "model.safetensors")["embedding.weight"]
    (row,), exact = await ours.compute([long]), table[request.prompt.token_ids].mean(axis=0, dtype=np.float64)
    assert request.tokens > 60_000
    assert np.abs(row - exact[: len(row)]).max() < 1e-4
    assert np.abs(row - static_reference(path).encode(long)).max() < 0.02  # it adds all of them in float32
    assert ours.folder.max_model_len == 2**17
    assert ServedModel(path, settings={"max_model_len": 900_000}).folder.max_model_len == 900_000
    truncation = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    cut = ServedModel(write_static(tmp_path / "cut", tokenizer_settings={"truncation": truncation}))
    assert cut.folder.max_model_len == 5
    side = cut.renderer.texts.tokenizers.first.truncation_side
    rows = await cut.compute(TEXTS, truncation_side=side)
    assert np.abs(rows - static_reference(cut.path).encode(list(TEXTS))).max() < 1e-5
    with pytest.raises(ContextLengthError, match="maximum context length is 5 tokens"):
        await cut.render(TEXTS[0], RenderingParams())


async def test_token_ids_are_those_of_the_table_whatever_the_tokenizer_has(tmp_path: Path):
    ours = ServedModel(STATIC["static"](tmp_path / "model"))
    table = load_file(ours.path / "model.safetensors")["embedding.weight"]
    (row,) = await ours.compute([TokensPrompt(np.array([len(table) - 1, 0]))])
    assert np.abs(row - table[[-1, 0], : len(row)].mean(axis=0)).max() < 1e-6
    for outside in (-1, len(table)):
        with pytest.raises(InvalidRequestError, match=f"this model's vocabulary has the ids 0 to {len(table) - 1}"):
            await ours.compute([TokensPrompt(np.array([outside]))])


def edit_tensors(path: Path, **tensors: Any) -> None:
    """Replace tensors of a file; ``None`` removes one."""
    whole = load_file(path / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, path / "model.safetensors")


def with_number(name: str, number: Any) -> Callable[[Path], None]:
    """Return what replaces the last number of a tensor."""

    def edit(path: Path) -> None:
        tensor = load_file(path / "model.safetensors")[name].copy()
        tensor[..., -1] = number
        edit_tensors(path, **{name: tensor})

    return edit


def with_modules(*modules: Module) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        write_modules(path, modules)
        edit_json(path / "modules.json", lambda entries: entries[0].update(type=NEW_STATIC))

    return edit


def without_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def with_more_tokens(path: Path) -> None:
    edit_tensors(path, mapping=np.zeros(20, np.int64), weights=np.ones(20))


GELU = "torch.nn.modules.activation.GELU"

REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (with_more_tokens, r"tokenizer\.json: the tokenizer has ids up to \d+, but the model has 20 token embeddings"),
    (with_number("mapping", 10**15), r"mapping \(int64\) contains numbers from \d+ to 1000000000000000; they must be"),
    (with_number("mapping", -1), "mapping .* contains numbers from -1 to"),
    (lambda path: edit_tensors(path, mapping=np.zeros(400), weights=None), r"mapping \(float64\) contains numbers"),
    (lambda path: edit_tensors(path, weights=np.ones(3)), r"shape of weights is \(3,\)"),
    (lambda path: edit_tensors(path, mapping=np.zeros(0, int), weights=None), r"shape of mapping is \(0,\)"),
    (lambda path: edit_tensors(path, embeddings=np.ones(3)), r"shape of the table is \(3,\)"),
    (lambda path: edit_tensors(path, embeddings=None), "neither a tensor embedding.weight nor embeddings"),
    (lambda path: edit_tensors(path, embeddings=np.ones((9, 2), bool)), "embeddings is in BOOL; accepted: F64, F32"),
    (with_number("embeddings", np.nan), "embeddings contains infinities or NaN"),
    (with_number("weights", np.inf), "weights contains infinities or NaN"),
    (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64), r"model\.safetensors cannot be read"),
    (without_weights, r"contains no model\.safetensors. Weights in pytorch_model\.bin are not supported"),
    (lambda path: (path / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be read"),
    (lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json cannot be read"),
    (lambda path: write_tokenizer(path, truncation={"max_length": 0}), "max_length of truncation is 0"),
    (with_modules(dense(WIDTH, 8, activation=GELU)), "activation_function is 'torch.nn.*GELU'; .*Tanh"),
    (with_modules(dense(WIDTH + 1, 8)), r"has the shapes .*\(8, 25\).*requires .*\(8, 24\)"),
    (with_modules(dense(WIDTH, 8, weights_file="pytorch_model.bin")), r"pytorch_model\.bin are not supported"),
    (with_modules(pooling("mean")), "requires Pooling, which cannot be loaded"),
    (with_modules(layer_norm(WIDTH + 1)), r"has the shapes .*\(25,\).*requires .*\(24,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_folder_that_contradicts_itself_is_refused_by_name(edit: Callable[[Path], object], said: str, tmp_path: Path):
    path = STATIC["potion"](tmp_path / "model")
    edit(path)
    refuse(path, said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "int8"}, "--dtype int8 does not apply to static embeddings"),
        ({"dtype": "fp8"}, "--dtype fp8 does not apply to static embeddings"),
        ({"backend": "openvino"}, "--backend openvino does not apply"),
        ({"backend": "compile"}, "--backend compile does not apply"),
        ({"pooling": "cls"}, "--pooling requires a Pooling module"),
        ({"task": "token_embed"}, "support only embed, score"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_obeyed_are_refused(settings: dict[str, Any], said: str, tmp_path: Path):
    refuse_to_load(STATIC["potion"](tmp_path / "model"), said, **settings)


def refuse_to_load(path: Path, said: str, **settings: Any) -> None:
    config = ModelConfig(**settings)
    with pytest.raises(ModelLoadError, match=said):
        load_transformer(read_model_folder(path, config), config, Offload())


def test_an_adapter_beside_a_table_is_refused(tmp_path: Path):
    """Where a joined folder has it."""
    path = STATIC["potion"](tmp_path / "model")
    write_json(path / "adapter_to_merge" / "adapter_config.json", {"peft_type": "LORA"})
    refuse_to_load(path, "an adapter needs a base that is one transformer")


PROGRAM = """
import sys
import trio
from trio_pool_serve import open_model

async def main():
    async with open_model(FOLDER, device="cuda") as model:
        vectors = await model.embed(["A nursery owns its tasks.", ""])
        print(vectors.shape, {"torch", "transformers", "openvino"} & {*sys.modules})

trio.run(main)
"""


def test_torch_and_transformers_are_not_imported_even_for_a_gpu(tmp_path: Path):
    """Neither to read the tokenizer nor to compute; ``cuda`` would be an error for a model that needs a device."""
    path = STATIC["static"](tmp_path / "model")
    program = PROGRAM.replace("FOLDER", repr(str(path)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "(2, 16) set()", done.stderr
