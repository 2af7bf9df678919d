"""Tiny late-interaction, sparse and BGE-M3 models with random weights, as their authors lay out the folders."""

import itertools
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from tests.kept_folders import built_once, by_name, each_built_once
from tests.model_folders import modules_json, write_json
from tests.models.model_families import (
    FAMILIES,
    HIDDEN,
    IDENTITY,
    MAX_LENGTH,
    OLD_UNIT_LENGTH,
    Module,
    bert_tokenizer,
    dense,
    distilbert_tokenizer,
    edit_json,
    modernbert_tokenizer,
    pooling,
    write_family,
    write_model,
    write_modules,
    write_transformer,
    xlm_roberta_tokenizer,
)
from trio_pool_serve.types import Vectors

QUERIES = (
    "What owns a task?",
    "Who is waiting, and for how many embeddings, while an event loop that is blocked serves nobody at all?",
    "yes",
    "",
    "größer, 東京",
)
"""Shorter than an expanded query, and longer."""

DOCUMENTS = (
    "A nursery owns its tasks.",
    "An event loop that is blocked serves nobody, however many clients are waiting for their embeddings.",
    "Yes",
    "Structured concurrency makes some faults impossible to write: every task has a parent. " * 3,
    "Naïve café: größer, 東京, emoji 🙂!",
    "",
    ". , : .",
    "The device computes the next batch while the rows of this one are copied to the host.",
)
"""One is longer than every limit, one is empty, one is nothing but punctuation."""

QUERY_LENGTH, DOCUMENT_LENGTH = 14, 40
WIDTH = 20
"""Dimensions of a token's vector."""

PYLATE_DENSE = "pylate.models.Dense.Dense"


def assert_same_ranking(ours: Vectors, theirs: Vectors) -> None:
    """For each query the documents come in the same order, but for those whose scores are as good as equal."""
    for own, wanted in zip(ours, theirs, strict=True):
        ranked = np.argsort(-wanted, kind="stable")
        for better, worse in itertools.pairwise(ranked):
            if wanted[better] - wanted[worse] > 1e-4:
                assert own[better] > own[worse]


def relative_difference(ours: Vectors, theirs: Vectors) -> float:
    """The largest difference, in parts of the number where that is above 1: sums over tokens and words grow."""
    return float((np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1)).max())


def add_to(tokenizer: Any, *tokens: str) -> Any:
    """Give a tokenizer more tokens, as PyLate does with markers: ordinary ones, that text is normalised before."""
    tokenizer.add_tokens(list(tokens))
    return tokenizer


# -- late interaction: the original ColBERT -----------------------------------------------------------------


def write_stanford(
    folder: Path,
    metadata: Mapping[str, Any] | None,
    *,
    family: str = "bert",
    prefix: str = "bert.",
    tokenizer: Any = None,
    is_pickled: bool = False,
) -> Path:
    """``HF_ColBERT``: the projection beside the encoder's weights, which have their class's name in front."""
    write_transformer(folder, family, tokenizer)
    edit_json(folder / "config.json", lambda config: config.update(architectures=["HF_ColBERT"]))
    weights = {f"{prefix}{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    (folder / "model.safetensors").unlink()
    if is_pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if metadata is not None:
        write_json(folder / "artifact.metadata", dict(metadata))
    return folder


def bert_with_unused() -> Any:
    """The real vocabulary holds ``[unused0]``, which is no special token."""
    vocabulary = bert_tokenizer().get_vocab()
    more = {f"[unused{index}]": len(vocabulary) + index for index in range(3)}
    pieces = {piece: len(vocabulary) + 3 + index for index, piece in enumerate(("unused", "##0", "##1", "[", "]", "?"))}
    return transformers.BertTokenizer(vocab=vocabulary | more | pieces, model_max_length=MAX_LENGTH)


def metadata(query_token: str, document_token: str) -> dict[str, Any]:
    """The settings of ``artifact.metadata``."""
    tokens = {"query_token_id": query_token, "doc_token_id": document_token}
    lengths = {"query_maxlen": QUERY_LENGTH, "doc_maxlen": DOCUMENT_LENGTH}
    return {**tokens, **lengths, "mask_punctuation": True, "attend_to_mask_tokens": False}


@built_once
def colbert_v2(folder: Path) -> Path:
    more = {"query_token": "[Q]", "doc_token": "[D]", "dim": WIDTH, "similarity": "cosine"}
    return write_stanford(folder, metadata("[unused0]", "[unused1]") | more, tokenizer=bert_with_unused())


@built_once
def colbert_without_metadata(folder: Path) -> Path:
    return write_stanford(folder, None, tokenizer=bert_with_unused(), is_pickled=True)


@built_once
def jina_colbert(folder: Path) -> Path:
    tokenizer = add_to(xlm_roberta_tokenizer(), "[QueryMarker]", "[DocumentMarker]")
    attending = {"mask_punctuation": False, "attend_to_mask_tokens": True}
    settings = metadata("[QueryMarker]", "[DocumentMarker]") | attending
    return write_stanford(folder, settings, family="xlm-roberta", prefix="roberta.", tokenizer=tokenizer)


# -- late interaction: PyLate -------------------------------------------------------------------------------


def marked(tokenizer: Any) -> Any:
    return add_to(tokenizer, "[Q] ", "[D] ")


def projection(in_features: int = HIDDEN, out_features: int = WIDTH, **more: object) -> Module:
    """PyLate's Dense has no name of what it reads."""
    made = dense(in_features, out_features, bias=False, activation=IDENTITY, use_residual=bool(more))
    return evolve(made, type=PYLATE_DENSE)


def write_pylate(folder: Path, family: str, *modules: Module, tokenizer: Any = None, **settings: object) -> Path:
    """A PyLate folder: masks and normalising go without saying, the tokenizer leaves room for the marker."""
    write_transformer(folder, family, tokenizer)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": DOCUMENT_LENGTH - 1, "do_lower_case": False})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": QUERY_LENGTH,
            "document_length": DOCUMENT_LENGTH,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation),
        }
        | settings,
    )
    write_modules(folder, modules or (projection(),))
    return folder


@built_once
def pylate_bert(folder: Path) -> Path:
    return write_pylate(folder, "bert", tokenizer=marked(bert_tokenizer()))


@built_once
def pylate_modernbert(folder: Path) -> Path:
    """As GTE-ModernColBERT and mxbai-edge-colbert are: no expansion, and several layers behind one another."""
    tokenizer = marked(modernbert_tokenizer())
    layers = (projection(HIDDEN, 2 * HIDDEN, use_residual=True), projection(2 * HIDDEN, WIDTH))
    return write_pylate(folder, "modernbert", *layers, tokenizer=tokenizer, do_query_expansion=False)


@built_once
def early_pylate(folder: Path) -> Path:
    """Before PyLate wrote down what type of model it is."""
    path = write_pylate(folder, "bert", tokenizer=marked(bert_tokenizer()), skiplist_words=None)
    edit_json(path / "config_sentence_transformers.json", lambda settings: settings.pop("model_type") and None)
    return path


# -- late interaction: sentence-transformers itself ---------------------------------------------------------


def write_multi_vector(
    folder: Path,
    family: str,
    mask: Mapping[str, Any] | None,
    *,
    normalizes: bool = True,
    prompts: Mapping[str, str] | None = None,
    similarity: str | None = None,
    pooling: Mapping[str, Any] | None = None,
    **transformer: Any,
) -> Path:
    """Put a model together with sentence-transformers, and let it write the folder."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

    bare = write_transformer(folder.with_name(f"{folder.name}-bare"), family)
    torch.manual_seed(1)
    modules: list[torch.nn.Module] = [
        Transformer(str(bare), max_seq_length=MAX_LENGTH, **transformer),
        Dense(HIDDEN, WIDTH, module_input_name="token_embeddings", activation_function=torch.nn.Tanh()),
    ]
    if mask is not None:
        modules.append(MultiVectorMask(**mask))
    if normalizes:
        modules.append(Normalize("token_embeddings"))
    if pooling is not None:
        modules.append(HierarchicalTokenPooling(**pooling))
    model = MultiVectorEncoder(
        modules=modules, prompts=dict(prompts or {}), similarity_fn_name=similarity, device="cpu"
    )
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@built_once
def some_tokens_only(folder: Path) -> Path:
    """Some documents have none of these tokens."""
    letters = [bert_tokenizer().convert_tokens_to_ids(piece) for piece in ("a", "##e", "##s", "the")]
    return write_multi_vector(folder, "bert", {"keep_only_token_ids": letters}, similarity="meanmaxsim")


@built_once
def pooled_documents(folder: Path) -> Path:
    return write_multi_vector(folder, "modernbert", {}, pooling={"pool_factor": 2}, query_length=QUERY_LENGTH)


LATE_INTERACTION: Mapping[str, Callable[[Path], Path]] = {
    **by_name(colbert_v2, colbert_without_metadata, jina_colbert, pylate_bert, pylate_modernbert, early_pylate),
    **each_built_once(
        pylate_attending=lambda folder: write_pylate(
            folder, "bert", tokenizer=marked(bert_tokenizer()), attend_to_expansion_tokens=True, skiplist_words=[]
        ),
        pylate_expanding_modernbert=lambda folder: write_pylate(
            folder, "modernbert", tokenizer=marked(modernbert_tokenizer())
        ),
        # A marker that the tokenizer does not know is ordinary text, and comes before a prompt.
        pylate_lfm2=lambda folder: write_pylate(
            folder, "lfm2", tokenizer=marked(modernbert_tokenizer()), do_query_expansion=False
        ),
        pylate_with_prompts=lambda folder: write_pylate(
            folder, "roberta", prompts={"query": "query: ", "document": "[D] text: "}, skiplist_words=None
        ),
        fixed_expansion=lambda folder: write_multi_vector(
            folder,
            "distilbert",
            {"skiplist_words": list(string.punctuation)},
            prompts={"query": "query: ", "document": "passage: "},
            query_expansion={"strategy": "fixed", "length": QUERY_LENGTH},
            document_length=DOCUMENT_LENGTH,
        ),
        least_expansion=lambda folder: write_multi_vector(
            folder,
            "roberta",
            {"skiplist_words": [","], "skiplist_tasks": ["query", "document"]},
            query_expansion={"strategy": "min", "length": 8, "attend": True},
            query_length=2 * QUERY_LENGTH,
            similarity="meanmaxsim",
        ),
        expansion_by_a_token=lambda folder: write_multi_vector(
            folder,
            "xlm-roberta",
            {},
            query_expansion={"strategy": "min", "length": QUERY_LENGTH, "token": "</s>"},
            similarity="meanmaxsim",
        ),
        without_expansion=lambda folder: write_multi_vector(
            folder, "modernbert", {}, query_length=QUERY_LENGTH, normalizes=False
        ),
        without_mask=lambda folder: write_multi_vector(
            folder, "bert", None, query_expansion={"strategy": "fixed", "length": QUERY_LENGTH}
        ),
    ),
    **by_name(some_tokens_only, pooled_documents),
    **each_built_once(
        pooled_queries_and_documents=lambda folder: write_multi_vector(
            folder,
            "distilbert",
            {"skiplist_words": [","]},
            pooling={
                "pool_factor": 1.5,
                "num_protected_tokens": 0,
                "normalize_embeddings": False,
                "tasks": ["query", "document"],
            },
            similarity="meanmaxsim",
        )
    ),
}

# -- sparse -------------------------------------------------------------------------------------------------

MASKED_LMS = ("bert", "distilbert", "xlm-roberta", "roberta", "modernbert")


@built_once
def write_masked_lm(folder: Path, name: str) -> Path:
    """A bare masked language model, as ``naver/splade-*`` were first published."""
    family = FAMILIES[name]
    return write_model(folder, family.model.replace("Model", "ForMaskedLM"), family.tokenizer(), **family.config)


def splade_modules(bare: Path, **pooling_config: Any) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return [
        Transformer(str(bare), transformer_task="fill-mask", max_seq_length=MAX_LENGTH),
        SpladePooling(**pooling_config),
    ]


def write_splade(folder: Path, name: str, *, max_weights: int | None = None, **pooling_config: Any) -> Path:
    """Put a model together with sentence-transformers, and let it write the folder."""
    from sentence_transformers import SparseEncoder

    bare = write_masked_lm(folder.with_name(f"{folder.name}-bare"), name)
    modules, prompts = splade_modules(bare, **pooling_config), {"query": "query: "}
    model = SparseEncoder(modules=modules, max_active_dims=max_weights, prompts=prompts, device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@built_once
def splade_max(folder: Path) -> Path:
    return write_splade(folder, "bert")


@built_once
def splade_sum(folder: Path) -> Path:
    return write_splade(folder, "distilbert", pooling_strategy="sum")


EARLY_MODULES = "sentence_transformers.sparse_encoder.models"


def write_early_transformer(folder: Path, name: str) -> None:
    write_masked_lm(folder, name)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})


@built_once
def early_splade(folder: Path) -> Path:
    """As sentence-transformers 5.0 wrote it."""
    write_early_transformer(folder, "bert")
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    splade = f"{EARLY_MODULES}.SpladePooling", "1_SpladePooling"
    write_json(folder / "modules.json", modules_json((f"{EARLY_MODULES}.MLMTransformer", ""), splade))
    return folder


def write_inference_free(folder: Path, default_route: str | None = "document") -> Path:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules.router import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    bare = write_masked_lm(folder.with_name(f"{folder.name}-bare"), "bert")
    tokenizer = bert_tokenizer()
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(5))
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(tokenizer, weight=weight)],
        document_modules=splade_modules(bare, activation_function="log1p_relu"),
        default_route=default_route,
    )
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder


@built_once
def inference_free(folder: Path) -> Path:
    return write_inference_free(folder)


@built_once
def opensearch(folder: Path) -> Path:
    """The transformer lies in the root, as the name of its module is empty."""
    write_early_transformer(folder, "distilbert")
    table = folder / "query_0_SparseStaticEmbedding"
    tokenizer = distilbert_tokenizer()
    tokenizer.save_pretrained(table)
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(6))
    torch.save({"weight": weight}, table / "pytorch_model.bin")
    write_json(table / "config.json", {"frozen": True})
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu", "word_embedding_dimension": None}
    write_json(folder / "document_1_SpladePooling" / "config.json", pooling)
    types = {table.name: "SparseStaticEmbedding", "": "MLMTransformer", "document_1_SpladePooling": "SpladePooling"}
    router = {
        "types": {name: f"{EARLY_MODULES}.{kind}" for name, kind in types.items()},
        "structure": {"query": [table.name], "document": ["", "document_1_SpladePooling"]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / "router_config.json", router)
    write_json(folder / "modules.json", modules_json(("sentence_transformers.models.Router", "")))
    return folder


LATENTS = 64


def write_csr(folder: Path, family: str, *, max_weights: int | None = None, **config: Any) -> Path:
    """Put an autoencoder with random biases behind an embedding model, and let sentence-transformers write it."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    bare = write_transformer(folder.with_name(f"{folder.name}-bare"), family)
    torch.manual_seed(8)
    encoder = SparseAutoEncoder(HIDDEN, LATENTS, **config)
    for parameter in (encoder.encoder.weight, encoder.pre_bias, encoder.latent_bias):
        torch.nn.init.normal_(parameter, std=0.3)
    modules: list[torch.nn.Module] = [
        Transformer(str(bare), max_seq_length=MAX_LENGTH), Pooling(HIDDEN, pooling_mode="mean"), encoder,
    ]  # fmt: skip
    model = SparseEncoder(modules=modules, max_active_dims=max_weights, prompts={"query": "query: "}, device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@built_once
def csr(folder: Path) -> Path:
    return write_csr(folder, "bert", k=5)


SPARSE: Mapping[str, Callable[[Path], Path]] = {
    **by_name(splade_max, splade_sum),
    **each_built_once(
        splade_of_two_logarithms=lambda folder: write_splade(folder, "xlm-roberta", activation_function="log1p_relu"),
        splade_sum_of_two_logarithms=lambda folder: write_splade(
            folder, "roberta", pooling_strategy="sum", activation_function="log1p_relu"
        ),
        splade_modernbert=lambda folder: write_splade(folder, "modernbert", max_weights=12),
        # Texts without an input type take the first route, the queries'.
        inference_free_by_default=lambda folder: write_inference_free(folder, default_route=None),
    ),
    **by_name(early_splade, inference_free, opensearch, csr),
    **each_built_once(
        # Of 60 numbers, only those above zero are left.
        csr_standardised=lambda folder: write_csr(folder, "modernbert", k=60, normalize=True),
        csr_of_a_decoder=lambda folder: write_csr(folder, "qwen3", k=5, max_weights=9),
    ),
}

# -- BGE-M3 -------------------------------------------------------------------------------------------------


@built_once
def write_bge_m3(folder: Path, *, with_modules: bool = True) -> Path:
    """The dense model's folder with two linear layers beside it, saved in half precision."""
    write_family(folder, "xlm-roberta", modules=(pooling("cls"), OLD_UNIT_LENGTH))
    if not with_modules:
        (folder / "modules.json").unlink()
    torch.manual_seed(2)
    for name, out_features in (("sparse_linear.pt", 1), ("colbert_linear.pt", HIDDEN)):
        torch.save(torch.nn.Linear(HIDDEN, out_features).half().state_dict(), folder / name)
    return folder
