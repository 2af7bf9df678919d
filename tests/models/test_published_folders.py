"""Folders as their authors publish them, for code outside transformers, give what transformers' own class gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.models.classifier_families import PAIRS, PROMPTS, cross_encoder, reranker_tokenizer
from tests.models.model_families import (
    AUTO_MAP,
    NEW,
    OF_NEMOTRON,
    TEXTS,
    UNIT_LENGTH,
    Published,
    ServedModel,
    edit_json,
    edit_weights,
    largest_difference,
    legacy_pooling,
    linear_rope,
    llama_tokenizer,
    pooling,
    qwen3_tokenizer,
    reference,
    refuse,
    write_family,
    write_model,
    write_modules,
    xlm_roberta_tokenizer,
)
from tests.models.retrieval_families import relative_difference
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.native_configs import NATIVE, native_config
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.runner.loaded_model import LoadingParams
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.types import Classify, SparseEmbed

Record = Callable[..., None]
RAW, SCORE = Classify("raw"), Classify("score")


def change_config(path: Path, **changes: Any) -> None:
    edit_json(path / "config.json", lambda config: config.update(changes))


def test_each_entry_has_the_names_of_transformers_class_and_assumes_only_what_it_does_not_read():
    for native in NATIVE.values():
        config = transformers.CONFIG_MAPPING[native.model_type]()
        of_class = {*config.to_dict(), "rope_theta", "hidden_act", "is_causal"}
        assert {*native.names.values(), *native.added, *native.fixed} <= of_class
        assert {*native.names, *native.assumed} - {"hidden_act"} & of_class == set()


def test_ntk_scaling_has_the_frequencies_of_the_published_code():
    """Su, https://kexue.fm/archives/9706, formula 6."""
    base, factor, width = 20_000.0, 8.0, 64
    published = {"hidden_size": 768, "num_attention_heads": 12, "rope_theta": base}
    scaling = {"type": "ntk", "factor": factor}
    native = NATIVE["new"]
    config = transformers.GteConfig.from_dict(native_config(native, "", published | {"rope_scaling": scaling}))
    rope = transformers.models.gte.modeling_gte.GteRotaryEmbedding(config)
    steps = np.arange(0, width, 2) / width
    expected = (base * factor) ** -steps / factor ** (2 / width)
    assert rope.inv_freq.numpy() == pytest.approx(expected, rel=1e-6)
    assert rope.attention_scaling == 1


@pytest.mark.parametrize(("declared", "mode"), [("avg", "mean"), ("cls", "cls"), ("last", "lasttoken")])
async def test_a_bare_llama_nemotron_is_pooled_as_its_config_says(
    declared: str, mode: str, tmp_path: Path, record_agreement: Record
):
    modules = [pooling(mode), UNIT_LENGTH]
    path = write_family(tmp_path / "bare", "llama-nemotron", modules=modules)
    change_config(path, pooling=declared)
    for file in ("modules.json", "config_sentence_transformers.json"):
        (path / file).unlink()
    ours = ServedModel(path)
    assert ours.folder.spec.assumption == ""
    theirs = reference(write_family(tmp_path / "oracle", "llama-nemotron", modules=modules, as_published=False))
    found = [
        *await ours.embed(TEXTS),
        *await ours.compute(TEXTS, instruction=ours.folder.prompts["document"], together=False),
    ]
    expected = [*theirs.encode(list(TEXTS)), *theirs.encode(list(TEXTS), prompt="passage: ")]
    difference = largest_difference(found, expected)
    assert difference < 1e-5
    record_agreement("llama-nemotron, bare", "embed", "sentence-transformers", difference)


def nemotron_logits(path: Path, mode: str) -> list[list[float]]:
    """As the published code computes them: of each pair alone, so that no padding matters."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.LlamaForSequenceClassification.from_pretrained(path).eval()
    logits = []
    for query, passage in PAIRS:
        ids = tokenizer(f"question:{query} \n \n passage:{passage}", truncation=True, return_tensors="pt")
        with torch.inference_mode():
            states = model.model(**ids).last_hidden_state[0]
            state = {"avg": states.mean(dim=0), "cls": states[0], "last": states[-1]}[mode]
            logits.append(model.score(state).tolist())
    return logits


@pytest.mark.parametrize(
    ("mode", "backend"), [("avg", "torch"), ("cls", "torch"), ("last", "torch"), ("avg", "openvino")]
)
async def test_a_llama_nemotron_reranker_scores_pairs_in_its_card_s_template(
    mode: str, backend: str, tmp_path: Path, record_agreement: Record
):
    if backend == "openvino":
        pytest.importorskip("openvino")
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    path, oracle = tmp_path / "model", tmp_path / "oracle"
    for folder in (path, oracle):
        write_model(folder, "LlamaForSequenceClassification", tokenizer, num_labels=1, is_causal=False)
    OF_NEMOTRON.publish(path)
    change_config(path, architectures=["LlamaBidirectionalForSequenceClassification"], pooling=mode)
    ours, expected = ServedModel(path, settings={"backend": backend, "cache_dir": ""}), nemotron_logits(oracle, mode)
    assert np.ptp(expected) > 0.01, "agreement would prove nothing"
    found = [await ours.compute(PROMPTS, RAW, together=together) for together in (True, False)]
    difference = max(largest_difference(each, np.array(expected)) for each in found)
    assert difference < 1e-5
    record_agreement("llama-nemotron reranker", "score", "formula of the model card", difference)
    sigmoid = 1 / (1 + np.exp(-np.array(expected)))
    assert largest_difference(await ours.compute(PROMPTS, SCORE), sigmoid) < 1e-5


def write_gte(path: Path, head: str, **config: Any) -> Path:
    """Write a gte with a head as published, and beside it as transformers' class saves it; return that."""
    oracle = path.with_name("oracle")
    for folder in (path, oracle):
        write_model(folder, f"GteFor{head}", xlm_roberta_tokenizer(), **linear_rope(20_000, 8.0, 16), **config)

    def rename(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith("gte.")]:
            weights[f"new.{name.removeprefix('gte.')}"] = weights.pop(name)

    edit_weights(path / "model.safetensors", rename)
    ntk = {"rope_theta": 20_000, "rope_scaling": {"factor": 8.0, "type": "ntk"}}
    added = NEW | ntk | {"architectures": [f"NewFor{head}"]}
    Published(added=added, dropped=("rope_parameters",)).publish(path)
    return oracle


async def test_a_sparse_gte_agrees(tmp_path: Path, record_agreement: Record):
    from sentence_transformers import SparseEncoder

    oracle = write_gte(tmp_path / "model", "MaskedLM")
    ours = ServedModel(tmp_path / "model", settings={"task": "sparse_embed"})
    expected = SparseEncoder(str(oracle), device="cpu").encode_document(list(TEXTS), convert_to_sparse_tensor=False)
    assert np.ptp(expected.numpy(), axis=0).max() > 0.01, "agreement would prove nothing"
    found = await ours.compute(TEXTS, SparseEmbed())
    rows = np.zeros(expected.shape, np.float32)
    for row, weights in zip(rows, found, strict=True):
        row[weights.indices] = weights.values
    difference = relative_difference(rows, expected.numpy())
    assert difference < 1e-5
    record_agreement("gte masked language model", "sparse_embed", "SparseEncoder", difference)


async def test_a_gte_reranker_agrees(tmp_path: Path, record_agreement: Record):
    path = tmp_path / "model"
    oracle = write_gte(path, "SequenceClassification", num_labels=1)
    ours, expected = ServedModel(path), cross_encoder(oracle).predict(PAIRS)[:, None]
    assert np.ptp(expected) > 0.01, "agreement would prove nothing"
    found = [await ours.compute(PROMPTS, SCORE, together=together) for together in (True, False)]
    difference = max(largest_difference(each, expected) for each in found)
    assert difference < 1e-5
    record_agreement("gte reranker", "score", "CrossEncoder", difference)


def test_weights_of_a_class_that_only_the_repository_s_code_has_are_refused(tmp_path: Path):
    """LFM2.5-Embedding's fit transformers' own Lfm2Model, whose convolutions are causal."""
    path = write_family(tmp_path / "lfm2", "lfm2")
    change_config(path, architectures=["Lfm2BidirectionalModel"], **AUTO_MAP)
    refuse(path, r"config\.json: architectures is Lfm2BidirectionalModel, .* only with --trust-remote-code")


def test_a_family_whose_states_exceed_float16_is_refused_in_it(tmp_path: Path):
    folder = read_model_folder(write_family(tmp_path / "gemma3", "gemma3"))
    params = LoadingParams(device=torch.device("cpu"), dtype=torch.float16, pad_token_id=0, max_tokens=8)
    with pytest.raises(ModelLoadError, match="--dtype float16: states of gemma3_text exceed its range; use bfloat16"):
        load_checkpoint(folder, params)


def last_states(path: Path, inputs: list[list[int]]) -> list[np.ndarray]:
    """The unit vectors of the last tokens' states without a causal mask, each text alone."""
    config = transformers.AutoConfig.from_pretrained(path)
    config.is_causal = False
    model = transformers.AutoModel.from_pretrained(path, config=config).eval()
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in inputs]
    return [nn.functional.normalize(state, dim=0).numpy() for state in states]


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Mistral", "Llama"])
async def test_a_decoder_that_says_it_is_bidirectional_is(name: str, backend: str, tmp_path: Path):
    if backend == "openvino":
        pytest.importorskip("openvino")
    path = write_model(tmp_path / "model", f"{name}Model", qwen3_tokenizer())
    write_modules(path, [pooling("lasttoken"), UNIT_LENGTH])
    causal = reference(path).encode(list(TEXTS))
    change_config(path, use_bidirectional_attention=True)
    expected = last_states(
        path, transformers.AutoTokenizer.from_pretrained(path)(list(TEXTS), truncation=True).input_ids
    )
    assert largest_difference(causal, expected) > 0.01, "agreement would prove nothing"
    ours = ServedModel(path, settings={"backend": backend, "cache_dir": ""})
    for together in (True, False):
        assert largest_difference(await ours.embed(TEXTS, together=together), expected) < 1e-5


def test_gemma_reads_its_own_key(tmp_path: Path):
    folder = read_model_folder(write_family(tmp_path / "gemma3", "gemma3"))
    assert folder.transformer_config["use_bidirectional_attention"] is True
    assert folder.native_config is None


GTE_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"},
}


@pytest.mark.parametrize("config", [{}, {"is_causal": False}])
@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("ends", [False, True])
async def test_gte_qwen_ends_texts_and_has_no_causal_mask(
    config: dict[str, Any], backend: str, tmp_path: Path, record_agreement: Record, *, ends: bool
):
    """As https://huggingface.co/Alibaba-NLP/gte-Qwen2-1.5B-instruct computes it by its own code.

    ``ends``: a newer tokenizer.json that adds the token itself.
    """
    if backend == "openvino":
        pytest.importorskip("openvino")
    tokenizer = qwen3_tokenizer() if ends else reranker_tokenizer()
    path = write_model(tmp_path / "model", "Qwen2ForCausalLM", tokenizer)
    write_modules(path, [legacy_pooling("lasttoken"), UNIT_LENGTH])
    change_config(path, **GTE_QWEN, **config)
    longest = tokenizer.model_max_length - 1
    ids = tokenizer(list(TEXTS), add_special_tokens=False, truncation=True, max_length=longest).input_ids
    expected = last_states(path, [[*row, tokenizer.convert_tokens_to_ids("<|endoftext|>")] for row in ids])
    ours = ServedModel(path, settings={"backend": backend, "cache_dir": ""})
    found = [await ours.embed(TEXTS, together=together) for together in (True, False)]
    difference = max(largest_difference(each, expected) for each in found)
    assert difference < 1e-5
    record_agreement("gte-qwen2", "embed", "formula of the model card", difference)
    assert ours.folder.spec.tasks == {"embed", "token_embed", "score"}


def test_a_cached_tokenizer_ends_texts_too(tmp_path: Path):
    path = write_model(tmp_path / "model", "Qwen2ForCausalLM", reranker_tokenizer())
    cache = ModelCache(tmp_path / "cache")
    before = load_tokenizer(read_model_folder(path), cache=cache)
    change_config(path, **GTE_QWEN)
    folder = read_model_folder(path)
    for _ in range(2):
        tokenizer = load_tokenizer(folder, cache=cache)
        assert tokenizer.special_tokens == before.special_tokens + 1
