"""Tiny models of real families with random weights, in the folder layout of sentence-transformers."""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from attrs import Factory, define, evolve, field, frozen
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from benchmarks.gpu.loaded_runner import without_graphs
from tests.cpu_backend import BY_TORCH
from tests.kept_folders import built_once
from tests.model_folders import write_json
from trio_pool_serve.config import Dtype, ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading import torch_loading
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.renderer_loading import renderer_of
from trio_pool_serve.models.loading.runner_loader import load_by_torch, load_transformer
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.loading.torch_loading import load_unfitted
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.prompts import InputType, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import (
    Batch,
    Embed,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    RunnerParams,
    Vectors,
)

TEXTS = (
    "A nursery owns its tasks.",
    "An event loop that is blocked serves nobody, however many clients are waiting for their embeddings.",
    "Yes",
    "Structured concurrency makes some faults impossible to write: every task has a parent, every wait can "
    "be cancelled, every failure has somewhere to go. " * 3,
    "Naïve café: größer, 東京, emoji 🙂!",
    "",
    "The device computes the next batch while the rows of this one are copied to the host.",
)
"""One is longer than every family's limit, one has no words, several have letters that no corpus had."""

MAX_LENGTH = 48
AS_THE_MODEL_SAYS = Embed()
HIDDEN = 32

POOLING = "sentence_transformers.models.Pooling"
NORMALIZE = "sentence_transformers.models.Normalize"
DENSE = "sentence_transformers.models.Dense"
NEW_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
NEW_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
NEW_DENSE = "sentence_transformers.base.modules.dense.Dense"


@frozen(kw_only=True)
class Module:
    """One entry of ``modules.json`` behind the transformer, with its weights."""

    type: str
    config: Mapping[str, Any] = Factory(dict)
    weights: Mapping[str, Tensor] = Factory(dict)
    weights_file: str = "model.safetensors"


def pooling(mode: str | list[str], **more: object) -> Module:
    """Pooling, as sentence-transformers 6 spells it."""
    return Module(
        type=NEW_POOLING, config={"embedding_dimension": HIDDEN, "pooling_mode": mode, "include_prompt": True} | more
    )


def legacy_pooling(*switches: str) -> Module:
    """Pooling, as sentence-transformers spelt it before 6."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    config = {f"pooling_mode_{name}": name in switches for name in names}
    return Module(type=POOLING, config={"word_embedding_dimension": HIDDEN, **config})


def dense(
    in_features: int = HIDDEN,
    out_features: int = HIDDEN,
    *,
    bias: bool = True,
    activation: str = "torch.nn.modules.activation.Tanh",
    use_residual: bool = False,
    weights_file: str = "model.safetensors",
) -> Module:
    random = torch.Generator().manual_seed(in_features + 7 * out_features)
    weights = {"linear.weight": torch.randn(out_features, in_features, generator=random) / in_features**0.5}
    if bias:
        weights["linear.bias"] = torch.randn(out_features, generator=random)
    config = {"in_features": in_features, "out_features": out_features, "bias": bias, "activation_function": activation}
    if use_residual:
        config["use_residual"] = True
        if in_features != out_features:
            weights["residual.weight"] = torch.randn(out_features, in_features, generator=random)
    return Module(type=NEW_DENSE, config=config, weights=weights, weights_file=weights_file)


def layer_norm(dimension: int = HIDDEN) -> Module:
    random = torch.Generator().manual_seed(dimension)
    weights = {f"norm.{name}": torch.randn(dimension, generator=random) for name in ("weight", "bias")}
    return Module(type=f"{MODULES}.layer_norm.LayerNorm", config={"dimension": dimension}, weights=weights)


def layer_weights(layer_start: int = 1, num_hidden_layers: int = 2) -> Module:
    """WeightedLayerPooling; one of the weights is negative."""
    weights = torch.tensor([0.7, 1.1, -0.3])[layer_start : num_hidden_layers + 1]
    config = {"embedding_dimension": HIDDEN, "layer_start": layer_start, "num_hidden_layers": num_hidden_layers}
    return Module(type=LAYER_POOLING, config=config, weights={"layer_weights": weights})


MODULES = "sentence_transformers.sentence_transformer.modules"
LAYER_POOLING = f"{MODULES}.weighted_layer_pooling.WeightedLayerPooling"
DROPOUT = Module(type=f"{MODULES}.dropout.Dropout", config={"dropout": 0.1})
IDENTITY = "torch.nn.modules.linear.Identity"
plain_dense = partial(dense, bias=False, activation=IDENTITY)
LEGACY_DENSE = evolve(dense(HIDDEN, 20), type=DENSE)


def write_modules(folder: Path, modules: Sequence[Module]) -> None:
    """Write ``modules.json`` for a transformer in the root and ``modules`` behind it."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, module in enumerate(modules, start=1):
        path = f"{index}_{module.type.rpartition('.')[2]}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": module.type})
        write_json(folder / path / "config.json", dict(module.config))
        if module.weights and module.weights_file.endswith(".safetensors"):
            save_file(dict(module.weights), folder / path / module.weights_file)
        elif module.weights:
            torch.save(dict(module.weights), folder / path / module.weights_file)
    write_json(folder / "modules.json", entries)


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    """Change a JSON file: ``edit`` changes the document in place, or returns another."""
    document = json.loads(path.read_text())
    write_json(path, edit(document) or document)


def edit_weights(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file in place."""
    is_safe = path.suffix == ".safetensors"
    weights = load_file(path) if is_safe else torch.load(path, weights_only=True)
    edit(weights)
    path.unlink()
    if is_safe:
        save_file(weights, path, metadata={"format": "pt"})
    else:
        torch.save(weights, path)


def without(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    """Return what removes the weights with a prefix, of which there must be some."""

    def remove(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if name.startswith(prefix)]
        assert names
        for name in names:
            del weights[name]

    return remove


# -- tokenizers -----------------------------------------------------------------------------------------


CORPUS = [text for text in TEXTS if text.isascii()]
LETTERS = sorted(set("".join(CORPUS)) - {" "})
WORDS = sorted(set(" ".join(CORPUS).split()))[::2]
"""Half of the words, so that the others are put together from letters."""


def _trained(model: Any, trainer: Any, *, pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_pieces(*special: str) -> dict[str, int]:
    """Written down rather than trained: that trainer breaks ties differently each time."""
    letters = sorted({letter.lower() for letter in LETTERS})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *(word.lower() for word in WORDS)]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def byte_pairs(*special: str) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def vocab_and_merges(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _unigrams(*special: str) -> list[tuple[str, float]]:
    pieces = [(piece, 0.0) for piece in special]
    return [*pieces, *((letter, -9.0) for letter in ["▁", *LETTERS]), *((f"▁{word}", -5.0) for word in WORDS)]


def of_vocabulary(name: str, pieces: Callable[..., Any], *special: str, **more: Any) -> Callable[[], Any]:
    """Return what makes a tokenizer of one of transformers' classes, with special tokens before the pieces."""
    return lambda: getattr(transformers, name)(vocab=pieces(*special), model_max_length=MAX_LENGTH, **more)


OF_BERT = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
OF_ROBERTA = "<s>", "<pad>", "</s>", "<unk>", "<mask>"

bert_tokenizer = of_vocabulary("BertTokenizer", _word_pieces, *OF_BERT)
distilbert_tokenizer = of_vocabulary("DistilBertTokenizer", _word_pieces, *OF_BERT)
mpnet_tokenizer = of_vocabulary("MPNetTokenizer", _word_pieces, "<s>", "<pad>", "</s>", "[UNK]", "<mask>")
xlm_roberta_tokenizer = of_vocabulary("XLMRobertaTokenizer", _unigrams, *OF_ROBERTA)
t5_tokenizer = of_vocabulary("T5Tokenizer", _unigrams, "<pad>", "</s>", "<unk>", extra_ids=0)
deberta_tokenizer = of_vocabulary("DebertaV2Tokenizer", _unigrams, "[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")


def roberta_tokenizer() -> Any:
    return transformers.RobertaTokenizer(**vocab_and_merges(byte_pairs(*OF_ROBERTA)), model_max_length=MAX_LENGTH)


def modernbert_tokenizer() -> Any:
    pairs = byte_pairs(*OF_BERT)
    pairs.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", pairs.token_to_id("[CLS]")), ("[SEP]", pairs.token_to_id("[SEP]"))],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs, mask_token="[MASK]", model_max_length=MAX_LENGTH, **names
    )


def qwen3_tokenizer() -> Any:
    """Ends every text with <|endoftext|> and pads on the left, as Qwen3-Embedding's does."""
    pairs = byte_pairs("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = transformers.Qwen2Tokenizer(**vocab_and_merges(pairs), padding_side="left", model_max_length=MAX_LENGTH)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    return tokenizer


def llama_tokenizer() -> Any:
    """Begins every text with <|begin_of_text|>, and pads on the left."""
    pairs = byte_pairs("<|begin_of_text|>", "<|eot_id|>")
    begin = "<|begin_of_text|>"
    pairs.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, pairs.token_to_id(begin))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs, bos_token=begin, eos_token="<|eot_id|>", pad_token="<|eot_id|>", padding_side="left",
        model_max_length=MAX_LENGTH,
    )  # fmt: skip


def gemma_tokenizer() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pairs = _trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=160, special_tokens=special, max_token_length=4, show_progress=False),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        normalizer=normalizers.Replace(" ", "▁"),
    )
    tokenizer = transformers.GemmaTokenizer(**vocab_and_merges(pairs), model_max_length=MAX_LENGTH)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>")],
    )
    return tokenizer


# -- families -------------------------------------------------------------------------------------------

ENCODER = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
"""A wide initializer: with the usual 0.02 attention adds next to nothing, and its faults would not show."""


DECODER = {"num_key_value_heads": 1, "head_dim": 16}


def config_of(kind: str, vocab_size: int, **more: Any) -> Any:
    """Return a tiny config of a family."""
    of_kind: Mapping[str, dict[str, Any]] = {
        "Bert": {},
        "Roberta": {"type_vocab_size": 1, "pad_token_id": 1},
        "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 1},
        "DistilBert": {"dim": HIDDEN, "hidden_dim": 48, "n_layers": 2, "n_heads": 2},
        "ModernBert": {
            "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0, "cls_token_id": 2,
            "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "initializer_cutoff_factor": 2.0,
        },
        "DebertaV2": {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "type_vocab_size": 0,
            "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
        },
        "Qwen2": {"num_key_value_heads": 1, "max_position_embeddings": 512},
        "Qwen3": {"max_position_embeddings": 512, **DECODER},
        "Llama": {"max_position_embeddings": 512, **DECODER},
        "Mistral": {"max_position_embeddings": 512, **DECODER, "sliding_window": None},
        "Gemma2": {"max_position_embeddings": 512, **DECODER, "query_pre_attn_scalar": 16},
        "Granite": {"max_position_embeddings": 512, "num_key_value_heads": 1},
        "MPNet": {"pad_token_id": 1},
        "Gemma3Text": {
            "max_position_embeddings": 64, **DECODER, "sliding_window": 8, "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "NomicBert": {"pad_token_id": 0},
        "Gte": {"type_vocab_size": 2, "pad_token_id": 1},
        "JinaEmbeddingsV3": {"pad_token_id": 1},
        "EuroBert": {"max_position_embeddings": 512, "pad_token_id": 0, "num_key_value_heads": 1},
        "Lfm2": {
            "num_key_value_heads": 1, "norm_eps": 1e-5, "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False, "pad_token_id": 1,
        },
        "EmbeddingGemma2": {
            **DECODER, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
            "per_layer_config": {1: {"head_dim": 16}}, "hidden_size_per_layer_input": 8, "embedding_dim": HIDDEN,
        },
        "Ministral3": {"max_position_embeddings": 512, **DECODER},
        "ConvBert": {"embedding_size": HIDDEN, "conv_kernel_size": 3},
        "FNet": {"pad_token_id": 0},
        "MobileBert": {"embedding_size": HIDDEN, "true_hidden_size": HIDDEN, "intra_bottleneck_size": HIDDEN},
        "T5": {"d_model": HIDDEN, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "initializer_factor": 1.0},
    }  # fmt: skip
    settings = {"vocab_size": vocab_size, "max_position_embeddings": 66, **ENCODER, **of_kind[kind], **more}
    if kind == "EmbeddingGemma2":
        placeholders = {f"{part}_token_id": vocab_size + at for at, part in enumerate(("image", "video", "audio"))}
        return transformers.EmbeddingGemma2Config(text_config=settings | {"vocab_size": vocab_size + 3}, **placeholders)
    return getattr(transformers, f"{kind}Config")(**settings)


def write_model(folder: Path, name: str, tokenizer: Any, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write transformers' class ``name`` with random weights."""
    torch.manual_seed(0)
    kind = re.sub(r"For[A-Z].*|(Encoder)?Model$", "", name)
    model = getattr(transformers, name)(config_of(kind, len(tokenizer), **config)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms start as zeros and ones, which hide faults
                parameter += 0.2 * torch.randn_like(parameter)
        if kind == "MobileBert":  # the published weights of [PAD] are none of zeros
            model.get_input_embeddings().weight[0] = model.get_input_embeddings().weight[1]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@frozen
class Published:
    """How a config.json of code outside transformers differs from that of transformers' class.

    The class saves weights by their published names, but for their ``prefix``.
    """

    names: Mapping[str, str] = Factory(dict)
    """The published name of each key that has another one."""
    added: Mapping[str, Any] = Factory(dict)
    dropped: tuple[str, ...] = ()
    prefix: str = ""

    def publish(self, folder: Path) -> None:
        """Change a folder that transformers has saved."""

        def rename(config: dict[str, Any]) -> dict[str, Any]:
            kept = {self.names.get(key, key): value for key, value in config.items() if key not in self.dropped}
            return kept | dict(self.added)

        edit_json(folder / "config.json", rename)
        if self.prefix:
            weights = folder / "model.safetensors"
            save_file({f"{self.prefix}{name}": weight for name, weight in load_file(weights).items()}, weights)


@frozen
class Family:
    """A family's class, its tokenizer and the modules after the transformer."""

    model: str
    tokenizer: Callable[[], Any]
    modules: tuple[Module, ...] = ()
    config: Mapping[str, Any] = Factory(dict)
    prompts: Mapping[str, str] = Factory(lambda: {"query": "query: "})
    published: Published | None = None


SHORT = {"max_position_embeddings": 64}

UNIT_LENGTH = Module(type=NEW_NORMALIZE)
OLD_UNIT_LENGTH = Module(type=NORMALIZE)

AUTO_MAP = {
    "auto_map": {"AutoConfig": "someone/code--configuration.Config", "AutoModel": "someone/code--modeling.Model"}
}
OF_NOMIC = Published(
    names={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon",
    },
    added={
        **AUTO_MAP, "activation_function": "swiglu", "causal": False, "max_trained_positions": 2048,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "n_positions": 8192, "parallel_block": False, "prenorm": False,
        "qkv_proj_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "use_rms_norm": False,
    },
    dropped=("hidden_act", "head_dim", "rope_parameters", "max_position_embeddings"),
)  # fmt: skip
OF_ALIBABA = {
    **AUTO_MAP, "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False,
    "pack_qkv": True, "position_embedding_type": "rope", "unpad_inputs": False, "use_memory_efficient_attention": False,
}  # fmt: skip
NEW = {**OF_ALIBABA, "model_type": "new", "architectures": ["NewModel"]}


def linear_rope(theta: float, factor: float, head_dim: int) -> dict[str, Any]:
    """Return the frequencies of Alibaba's NTK scaling, as transformers' converted folders write them."""
    return {
        "rope_parameters": {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    }


OF_NEMOTRON = Published(
    added={
        **AUTO_MAP, "model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "avg",
        "temperature": 1.0,
    },
    dropped=("is_causal",),
)  # fmt: skip
QUERY_AND_PASSAGE = {"query": "query: ", "document": "passage: "}
OF_GEMMA = {"query": "task: search result | query: ", "document": "title: none | text: "}
OF_SEARCH = {"query": "search_query: ", "document": "search_document: "}

FAMILIES: Mapping[str, Family] = {
    "bert": Family("BertModel", bert_tokenizer, (legacy_pooling("mean_tokens"), OLD_UNIT_LENGTH), SHORT),
    "roberta": Family("RobertaModel", roberta_tokenizer, (pooling("mean"),)),
    "distilbert": Family("DistilBertModel", distilbert_tokenizer, (legacy_pooling("cls_token"),), SHORT),
    "mpnet": Family("MPNetModel", mpnet_tokenizer, (pooling("mean"), UNIT_LENGTH)),
    "modernbert": Family("ModernBertModel", modernbert_tokenizer, (pooling("cls"), UNIT_LENGTH), SHORT),
    "xlm-roberta": Family("XLMRobertaModel", xlm_roberta_tokenizer, (legacy_pooling("cls_token"), dense())),
    "qwen3": Family(  # Qwen3-Embedding
        "Qwen3Model",
        qwen3_tokenizer,
        (pooling("lasttoken"), UNIT_LENGTH),
        SHORT,
        {"query": "Instruct: find\nQuery:", "document": ""},
    ),
    "gemma3": Family(
        "Gemma3TextModel",
        gemma_tokenizer,
        (pooling("mean"), plain_dense(HIDDEN, 64), plain_dense(64, HIDDEN), UNIT_LENGTH),
        prompts=OF_GEMMA,
    ),
    "t5": Family(
        "T5EncoderModel",
        t5_tokenizer,
        (legacy_pooling("mean_tokens"), plain_dense(HIDDEN, 24, weights_file="pytorch_model.bin"), OLD_UNIT_LENGTH),
    ),
    "nomic": Family(
        "NomicBertModel", bert_tokenizer, (legacy_pooling("mean_tokens"),), prompts=OF_SEARCH, published=OF_NOMIC
    ),
    "gte": Family(  # gte-multilingual-base
        "GteModel",
        xlm_roberta_tokenizer,
        (legacy_pooling("cls_token"), OLD_UNIT_LENGTH),
        linear_rope(20_000, 8.0, 16),
        published=Published(
            added=NEW | {"rope_theta": 20_000, "rope_scaling": {"factor": 8.0, "type": "ntk"}},
            dropped=("rope_parameters",),
            prefix="new.",
        ),
    ),
    "gte_without_scaling": Family(  # gte-base-en-v1.5
        "GteModel",
        bert_tokenizer,
        (legacy_pooling("cls_token"),),
        # A narrower initializer: with that of the others bfloat16 rounds a token's state by a third of its length.
        {
            "type_vocab_size": 0,
            "pad_token_id": 0,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
        published=Published(added=NEW | {"rope_theta": 500_000, "rope_scaling": None}, dropped=("rope_parameters",)),
    ),
    "gte_of_snowflake": Family(  # snowflake-arctic-embed-m-v2.0
        "GteModel",
        xlm_roberta_tokenizer,
        (pooling("cls"), UNIT_LENGTH),
        {"type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 160_000.0}},
        published=Published(added=OF_ALIBABA | {"rope_theta": 160_000}, dropped=("rope_parameters",)),
    ),
    "jina-embeddings-v3": Family("JinaEmbeddingsV3Model", xlm_roberta_tokenizer, (pooling("mean"), UNIT_LENGTH)),
    "eurobert": Family(
        "EuroBertModel", modernbert_tokenizer, (pooling("lasttoken"), UNIT_LENGTH), published=Published(added=AUTO_MAP)
    ),
    # The oracle pads on the left, as this tokenizer says; here rows are padded on the right.
    "lfm2": Family("Lfm2Model", llama_tokenizer, (pooling("mean"), UNIT_LENGTH)),
    "embeddinggemma2": Family(
        "EmbeddingGemma2Model", gemma_tokenizer, (pooling("mean"), UNIT_LENGTH), prompts=OF_GEMMA
    ),
    "ministral3": Family(  # Nemotron-3-Embed
        "Ministral3Model", qwen3_tokenizer, (pooling("mean"), UNIT_LENGTH), {"is_causal": False}, QUERY_AND_PASSAGE
    ),
    "mistral": Family("MistralModel", qwen3_tokenizer, (pooling("lasttoken"), UNIT_LENGTH)),
    "llama-nemotron": Family(
        "LlamaModel",
        llama_tokenizer,
        (legacy_pooling("mean_tokens"), OLD_UNIT_LENGTH),
        {"is_causal": False},
        QUERY_AND_PASSAGE,
        OF_NEMOTRON,
    ),
}


UNMASKED: Mapping[str, Family] = {
    "convbert": Family("ConvBertModel", bert_tokenizer, (pooling("mean"),), SHORT),
    "fnet": Family("FNetModel", bert_tokenizer, (pooling("mean"),), SHORT),
    "mobilebert": Family("MobileBertModel", bert_tokenizer, (pooling("cls"), UNIT_LENGTH), SHORT),
}
"""Families that do not mask padding: the oracle's vectors depend on its batch."""

LOADED_BY_ORACLE = [name for name in FAMILIES if name != "embeddinggemma2"]
"""Families that sentence-transformers loads; the processor of the other needs torchvision."""


def write_transformer(folder: Path, name: str, tokenizer: Any = None) -> Path:
    """Write a family's bare transformer, with another tokenizer than its own if given."""
    family = (FAMILIES | UNMASKED)[name]
    return write_model(folder, family.model, tokenizer or family.tokenizer(), **family.config)


@built_once
def write_family(
    folder: Path,
    name: str,
    *,
    modules: Sequence[Module] | None = None,
    as_published: bool = True,
    **transformer_config: object,
) -> Path:
    """Write a family's model, with ``modules`` in place of its usual ones if given.

    ``transformer_config`` is what sentence_bert_config.json holds beside the length limit. Unless ``as_published``,
    config.json is that of transformers' class, which the oracle needs.
    """
    family = (FAMILIES | UNMASKED)[name]
    write_transformer(folder, name)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, **transformer_config})
    write_json(folder / "config_sentence_transformers.json", {"prompts": dict(family.prompts)})
    write_modules(folder, family.modules if modules is None else modules)
    if family.published is not None and as_published:
        family.published.publish(folder)
    return folder


JINA_V5_TASKS = ("retrieval", "text-matching", "clustering", "classification")
JINA_V5_PROMPTS = {"query": "Query: ", "document": "Document: "}


def write_jina_v5(
    folder: Path, family: str, prompts: Mapping[str, str] = JINA_V5_PROMPTS, *, as_published: bool = True
) -> Path:
    """Write jina-embeddings-v5, small (``qwen3``) or nano (``eurobert``), without its adapters.

    Unless ``as_published``, as the oracle reads it.
    """
    write_family(folder, family, as_published=False)
    (folder / "sentence_bert_config.json").unlink()
    of_default = {"default_prompt_name": "document"} if as_published else {}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, **of_default})
    if not as_published:
        longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest})
        return folder
    published = {
        "model_type": "jina_embeddings_v5", "architectures": ["JinaEmbeddingsV5Model"], "task_names": JINA_V5_TASKS,
        "auto_map": {
            "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
            "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
        },
    } | ({"mask_token_id": 4} if family == "eurobert" else {})  # fmt: skip
    edit_json(folder / "config.json", lambda config: config.update(published))
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    write_json(folder / "modules.json", [module | {"kwargs": ["task", "truncate_dim"]}])
    return folder


def write_weighted_layers(
    folder: Path, name: str, weights: Module | None = None, *, has_hidden_states: object = True
) -> Path:
    """Write a family's model whose hidden states are weighed before they are pooled."""
    write_family(folder, name, modules=[weights or layer_weights(), pooling("mean"), UNIT_LENGTH])
    edit_json(folder / "config.json", lambda config: config.update(output_hidden_states=has_hidden_states))
    return folder


NORMALIZED_LAYER = (pooling("cls"), DROPOUT, plain_dense(HIDDEN, 24), layer_norm(24), UNIT_LENGTH, DROPOUT)

LAYOUTS: Mapping[str, Callable[[Path], Path]] = {
    "modernbert_with_layer_norm": partial(write_family, name="modernbert", modules=NORMALIZED_LAYER),
    **{
        f"{name}_with_weighted_layers": partial(write_weighted_layers, name=name)
        for name in ("bert", "qwen3", "gemma3", "t5")
    },
}
"""Modules that few published models have."""


# -- serving them ---------------------------------------------------------------------------------------


def loaded_runner(folder: ModelFolder, config: ModelConfig, offload: Offload, *, takes_embeds: bool = False) -> Any:
    """Load a runner that has chosen how it computes; a model is converted in this process."""
    params = RunnerParams(takes_embeds=takes_embeds)
    if folder.kind.open_runner:
        return load_transformer(folder, config, offload)(params)
    on_cpu = torch_loading.resolve_device(config.device).type == "cpu"  # not on the simulated GPU
    if config.backend in ("auto", "openvino") and on_cpu:
        from trio_pool_serve.models.loading.conversion_process import load_to_convert  # needs OpenVINO

        return CpuModel(folder, config, offload, load_by_torch, load_to_convert).open()(params)
    return load_unfitted(folder, config, offload)()


def load(path: Path, *, takes_embeds: bool = False, **options: Any) -> Any:
    """Load a folder's runner as the service does."""
    config = ModelConfig(device="cpu", **BY_TORCH | options)
    return loaded_runner(open_model_folder(str(path), config), config, Offload(), takes_embeds=takes_embeds)


@define(eq=False)
class ServedModel:
    """Renderer and runner of a folder, put together as the service does.

    ``settings`` are those of a ``ModelConfig``; with ``graphs=False`` among them there are no CUDA graphs.
    """

    path: Path
    dtype: Dtype = "float32"
    device: str = "cpu"
    settings: Mapping[str, Any] = Factory(dict)
    offload: Offload = field(factory=Offload)
    folder: ModelFolder = field(init=False)
    renderer: Renderer = field(init=False)
    runner: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = (BY_TORCH if self.device == "cpu" else {}) | dict(self.settings)
        graphs = settings.pop("graphs", True)
        config = ModelConfig(dtype=self.dtype, device=self.device, **settings)
        self.folder = open_model_folder(str(self.path), config)
        self.runner = loaded_runner(self.folder, config, self.offload)
        if not graphs:
            self.runner = without_graphs(self.runner)
        self.renderer = renderer_of(self.folder, load_tokenizer(self.folder), self.offload, workers=1)

    async def requests(
        self,
        inputs: Iterable[Any],
        params: PoolingParams | Iterable[PoolingParams | tuple[PoolingParams, ...]] = AS_THE_MODEL_SAYS,
        instruction: str = "",
        **rendering: Any,
    ) -> list[PoolingRequest]:
        """Render inputs, cut to the model's limit; ``params`` are for all, or for each."""
        how = RenderingParams(truncate_to=self.folder.max_model_len, instruction=instruction, **rendering)
        prompts = [await self.render(one, how) for one in inputs]
        wanted = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        return [
            PoolingRequest(prompt, each if isinstance(each, tuple) else (each,))
            for prompt, each in zip(prompts, wanted, strict=True)
        ]

    async def render(self, one: Any, how: RenderingParams) -> RenderedPrompt:
        """Render a text or a prompt."""
        return await self.renderer.render(TextPrompt(one) if isinstance(one, str) else one, how)

    async def compute(self, inputs: Iterable[Any], *args: Any, together: bool = True, **rendering: Any) -> Any:
        """Compute inputs, rendered as ``requests`` renders them, in one batch or each alone."""
        requests = await self.requests(inputs, *args, **rendering)
        batches = [Batch(tuple(requests))] if together else [Batch((request,)) for request in requests]
        return [value for batch in batches for (value,) in await self.runner.launch(batch)]

    embed = compute

    async def ask(
        self, texts: Sequence[str], params: Sequence[tuple[PoolingParams, ...]], input_type: InputType | None = None
    ) -> list[PoolingRequest]:
        """Render texts of an input type, with that input type's prompt; ``params`` is what is wanted of each."""
        instruction = self.folder.prompts.get(input_type or self.folder.default_prompt_name or "", "")
        return await self.requests(texts, params, instruction, input_type=input_type)

    async def values(
        self, texts: Sequence[str], *params: PoolingParams, input_type: InputType | None = None
    ) -> list[tuple[PooledValue, ...]]:
        """Compute the same of all texts, in one batch."""
        return await self.runner.launch(Batch(tuple(await self.ask(texts, [params] * len(texts), input_type))))


def refuse(path: Path, said: str, **settings: Any) -> None:
    """Require that loading a folder raises ``ModelLoadError`` with this message."""
    with pytest.raises(ModelLoadError, match=said):
        ServedModel(path, settings=settings)


def reference(path: Path, **options: Any) -> Any:
    """The oracle: sentence-transformers on the same folder."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(path), device="cpu", local_files_only=True, **options)


def shuffled(items: Sequence[Any], *, seed: int = 7) -> list[int]:
    """An order of all items, each twice."""
    order = [*range(len(items)), *range(len(items))]
    random.Random(seed).shuffle(order)
    return order


def largest_difference(ours: Sequence[Vectors], theirs: Sequence[Vectors]) -> float:
    """The largest absolute difference of any component."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
