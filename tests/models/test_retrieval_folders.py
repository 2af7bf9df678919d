"""What the files of late-interaction, sparse and BGE-M3 models declare, and what is refused of it."""

import string
from pathlib import Path

import pytest

from tests.model_folders import BARE, POOLING, TRANSFORMER, modules_json, write_files, write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.late_interaction import LateInteraction, QueryExpansion
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.sparse import Sparse
from trio_pool_serve.types import SparseEmbed, SparseLookup

pytestmark = pytest.mark.unit

PYLATE_DENSE = ("pylate.models.Dense.Dense", "1_Dense")
MASK = ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask")
SPLADE = ("sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling", "1_SpladePooling")

OWN, TEXTS, MODULES, METADATA = (
    "sentence_bert_config.json", "config_sentence_transformers.json", "modules.json", "artifact.metadata",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "model/config.json", BARE)
    return tmp_path / "model"


def write_modules(folder: Path, *entries: tuple[str, str]) -> None:
    write_json(folder / MODULES, modules_json(*entries))


def saved_from(*names: str, **more: object) -> dict[str, object]:
    """A folder's config.json that names the classes that the weights were saved from."""
    return {"config.json": BARE | {"architectures": list(names)} | more}


def architect(folder: Path, *names: str, **more: object) -> None:
    write_files(folder, saved_from(*names, **more))


def describe(folder: Path, **texts: object) -> None:
    write_json(folder / TEXTS, texts)


def late_interaction(folder: Path) -> LateInteraction:
    spec = read_model_folder(folder).spec
    assert isinstance(spec, LateInteraction)
    return spec


def sparse(folder: Path) -> Sparse:
    spec = read_model_folder(folder).spec
    assert isinstance(spec, Sparse)
    return spec


def refuse(folder: Path, said: str, config: ModelConfig | None = None) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_model_folder(folder, config or ModelConfig())


# -- late interaction ---------------------------------------------------------------------------------------


def test_the_original_colbert_is_read_from_its_metadata(folder: Path):
    architect(folder, "HF_ColBERT")
    write_json(
        folder / "artifact.metadata",
        {"query_token_id": "[unused5]", "doc_token_id": "[unused6]", "query_maxlen": 20, "doc_maxlen": 90},
    )
    read = read_model_folder(folder)
    assert read.prompts == {"query": "[unused5] ", "document": "[unused6] "}
    spec = late_interaction(folder)
    assert spec.expansion == QueryExpansion(length=20)
    assert spec.document_length == 90
    assert spec.mask is not None
    assert spec.mask.skipped_words == tuple(string.punctuation)


def test_a_colbert_without_metadata_is_one_still(folder: Path):
    architect(folder, "HF_ColBERT")
    spec = late_interaction(folder)
    assert (spec.expansion, spec.tasks, spec.scoring) == (
        QueryExpansion(length=32),
        {"token_embed", "score"},
        "late_interaction",
    )
    assert read_model_folder(folder).prompts == {"query": "[unused0] ", "document": "[unused1] "}


def test_an_instruction_of_pylate_comes_behind_the_marker(folder: Path):
    write_modules(folder, TRANSFORMER, PYLATE_DENSE)
    prompts = {"query": "find: ", "document": "[D] text: ", "other": "else"}
    describe(folder, model_type="ColBERT", query_prefix="[Q] ", document_prefix="[D] ", prompts=prompts)
    assert read_model_folder(folder).prompts == {"query": "[Q] find: ", "document": "[D] text: ", "other": "else"}


def test_a_document_may_be_longer_than_the_tokenizers_limit_which_leaves_room_for_the_marker(folder: Path):
    write_modules(folder, TRANSFORMER, PYLATE_DENSE)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 299})
    describe(folder, model_type="ColBERT", query_prefix="[Q] ", document_prefix="[D] ", document_length=300)
    assert read_model_folder(folder).max_model_len == 300


def test_no_input_is_longer_than_the_positions(folder: Path):
    architect(folder, "HF_ColBERT")
    write_json(folder / "artifact.metadata", {"doc_maxlen": 9000})
    assert read_model_folder(folder).max_model_len == 512


def test_pylate_expands_queries_unless_it_says_not_to(folder: Path):
    write_modules(folder, TRANSFORMER, PYLATE_DENSE)
    describe(folder, model_type="ColBERT", query_prefix="[Q] ", query_length=24, attend_to_expansion_tokens=True)
    assert late_interaction(folder).expansion == QueryExpansion(length=24, attends_to_expansion=True)
    describe(folder, model_type="ColBERT", query_prefix="[Q] ", query_length=24, do_query_expansion=False)
    spec = late_interaction(folder)
    assert (spec.expansion, spec.query_length) == (None, 24)


def test_code_of_the_models_own_needs_leave(folder: Path):
    architect(folder, "HF_ColBERT", auto_map={"AutoModel": "jinaai/xlm-roberta-flash--modeling.XLMRobertaModel"})
    refuse(folder, "only with --trust-remote-code")
    assert isinstance(read_model_folder(folder, ModelConfig(trust_remote_code=True)), ModelFolder)


MULTI_VECTOR = {TEXTS: {"model_type": "MultiVectorEncoder"}}


def multi_vector(module: tuple[str, str], config: object = None) -> dict[str, object]:
    modules = modules_json(TRANSFORMER, module, MASK)
    return MULTI_VECTOR | {MODULES: modules, f"{module[1]}/config.json": config or {}}


def settings(**own: object) -> dict[str, object]:
    return MULTI_VECTOR | {MODULES: modules_json(TRANSFORMER, MASK), OWN: own}


def expansion(strategy: str, **more: object) -> dict[str, object]:
    return {"strategy": strategy, **more}


REFUSED_LATE_INTERACTION = [
    *(
        (saved_from(name), f"{name} is an unsupported page retriever")
        for name in ("ColModernVBertForRetrieval", "ColQwen3ForRetrieval")
    ),
    # not served as embedding models
    *((saved_from(name), "has no projection") for name in ("ColBERT", "ColBERTModernBertModel")),
    ({METADATA: {"doc_maxlen": 90}}, "has no projection"),
    (multi_vector(("sentence_transformers.x.HierarchicalTokenPooling", "1")), "with a HierarchicalTokenPooling module"),
    (multi_vector(("sentence_transformers.models.LayerNorm", "1")), "with a LayerNorm module"),
    (multi_vector(POOLING), "with a Pooling module"),
    (multi_vector(PYLATE_DENSE, {"module_input_name": "sentence_embedding"}), "Dense maps 'sentence_emb"),
    (multi_vector(PYLATE_DENSE, {"module_output_name": "elsewhere"}), "to 'elsewhere'"),
    (multi_vector(("someone.elses.Dense", "1")), "someone.elses.Dense is not one of"),
    *(
        (settings(query_expansion=wrong), "query_expansion .* is not supported")
        for wrong in (expansion("double", length=8), expansion("fixed"), expansion("min", length=8, side="left"))
    ),
    (settings(query_expansion=expansion("min", length=8), query_length=7), "truncated to 7 tokens but expanded"),
    (settings(processing_kwargs={"text": {"padding": False}}), "processing_kwargs"),
    (settings(transformer_task="fill-mask"), "task is 'fill-mask'"),
    (saved_from("HF_ColBERT") | {"tokenizer_config.json": {"padding_side": "left"}}, "expansion on the left"),
    ({MODULES: modules_json(TRANSFORMER), TEXTS: {"query_prefix": "[Q] "}}, "no projection for the tokens"),
]


@pytest.mark.parametrize(("files", "said"), REFUSED_LATE_INTERACTION)
def test_late_interaction_that_is_not_supported_is_refused_by_name(folder: Path, files: dict[str, object], said: str):
    write_files(folder, files)
    refuse(folder, said)


# -- sparse -------------------------------------------------------------------------------------------------


def write_splade(folder: Path, pooling: object = None, **transformer: object) -> None:
    write_modules(folder, TRANSFORMER, SPLADE)
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "fill-mask"} | transformer)
    write_json(folder / "1_SpladePooling" / "config.json", pooling or {})


def test_splade_is_recognised_by_its_pooling(folder: Path):
    write_splade(folder, {"pooling_strategy": "sum", "activation_function": "log1p_relu"})
    spec = sparse(folder)
    assert (spec.splade_pooling, spec.log1p_twice) == ("sum", True)
    assert spec.tasks == {"sparse_embed"}
    assert spec.sparse_params("query") == SparseEmbed()


def test_a_bare_masked_language_model_is_sparse_if_the_operator_says_so(folder: Path):
    architect(folder, "BertForMaskedLM")
    assert isinstance(read_model_folder(folder).spec, Embedding)
    assert read_model_folder(folder, ModelConfig(task="sparse_embed")).spec == Sparse()


@pytest.mark.parametrize(
    ("pooling", "transformer", "said"),
    [
        ({"pooling_strategy": "mean"}, {}, "SpladePooling by mean of relu"),
        ({"activation_function": "gelu"}, {}, "SpladePooling by max of gelu"),
        ({}, {"transformer_task": "feature-extraction"}, "this kind of model needs fill-mask"),
        ({}, {"query_length": 7}, "requires query_length"),
    ],
)
def test_what_splade_cannot_do_is_named(folder: Path, pooling: object, transformer: dict[str, object], said: str):
    write_splade(folder, pooling, **transformer)
    refuse(folder, said)


def test_an_autoencoder_is_refused(folder: Path):
    encoder = ("sentence_transformers.sparse_encoder.modules.SparseAutoEncoder", "2_SparseAutoEncoder")
    write_modules(folder, TRANSFORMER, POOLING, encoder)
    describe(folder, model_type="SparseEncoder")
    refuse(folder, "Transformer, Pooling, SparseAutoEncoder is not supported")


TABLE = "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"
MLM = "sentence_transformers.sparse_encoder.models.MLMTransformer.MLMTransformer"


FREE = {"query": ["table"], "document": ["", "splade"]}


def write_router(folder: Path, *, parameters: object = None, **routes: list[str]) -> None:
    """A Router whose transformer lies in the root."""
    types = {"table": TABLE, "table2": TABLE, "../elsewhere": TABLE, "": MLM, "mlm2": MLM, "splade": SPLADE[0]}
    named = {name for names in routes.values() for name in names}
    write_modules(folder, ("sentence_transformers.models.Router", ""))
    write_json(
        folder / "router_config.json",
        {
            "types": {name: dotted for name, dotted in types.items() if name in named},
            "structure": routes,
            "parameters": {"default_route": "document"} if parameters is None else parameters,
        },
    )


def test_inference_free_splade_looks_queries_up(folder: Path):
    write_router(folder, **FREE)
    write_json(folder / "table" / "tokenizer_config.json", {"model_max_length": 77})
    spec = sparse(folder)
    assert spec.sparse_params("query") == SparseLookup()
    assert spec.sparse_params("document") == spec.sparse_params(None) == SparseEmbed()
    assert (spec.table, spec.lookup_length) == (folder / "table", 77)


def test_the_first_route_is_for_texts_without_a_role_if_no_other_is_named(folder: Path):
    write_router(folder, **FREE, parameters={"default_route": None})
    assert sparse(folder).sparse_params(None) == SparseLookup()


@pytest.mark.parametrize(
    ("routes", "parameters", "said"),
    [
        ({"query": ["table"], "document": ["table2"]}, {}, "0 transformers"),
        ({"query": ["", "splade"], "document": ["mlm2", "splade"]}, {}, "2 transformers"),
        ({"query": ["", "splade"], "document": ["", "splade"]}, {}, "one route is a SparseStaticEmbedding"),
        ({"query": ["table"], "passage": ["", "splade"]}, {}, "other routes than query and document"),
        ({"query": ["table"], "document": ["splade", ""]}, {}, "SpladePooling, MLMTransformer is not supported"),
        (FREE, {"route_mappings": {"(None, 'text')": "document"}}, "route_mappings"),
        ({"query": ["nothing"]}, {}, "Router of .* cannot be read"),
        ({"query": ["../elsewhere"]}, {}, "outside the model's folder"),
    ],
)
def test_routers_that_are_not_supported_are_refused(
    folder: Path, routes: dict[str, list[str]], parameters: dict[str, object], said: str
):
    write_router(folder, parameters={"default_route": "document"} | parameters, **routes)
    refuse(folder, said)


def test_a_table_with_another_tokenizer_is_refused(folder: Path):
    write_router(folder, **FREE)
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "truncation": {"max_length": 3}})
    write_json(folder / "table" / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "truncation": None})
    assert sparse(folder).table is not None
    write_json(folder / "table" / "tokenizer.json", {"model": {"vocab": {"b": 0}}, "truncation": None})
    refuse(folder, "another tokenizer")


def test_a_table_in_a_json_file_is_refused(folder: Path):
    write_router(folder, **FREE)
    write_json(folder / "table" / "config.json", {"path": "idf.json"})
    refuse(folder, "path is 'idf.json', which is not supported")


# -- BGE-M3 -------------------------------------------------------------------------------------------------


def test_one_of_the_two_layers_does_not_make_a_bge_m3(folder: Path):
    (folder / "sparse_linear.pt").touch()
    assert type(read_model_folder(folder).spec) is Embedding


def test_a_bge_m3_needs_to_know_its_special_tokens(folder: Path):
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (folder / name).touch()
    tokens = [{"id": index, "content": token} for index, token in enumerate(("<s>", "</s>", "<pad>"))]
    write_json(folder / "tokenizer.json", {"added_tokens": tokens})
    refuse(folder, "special tokens <unk>")
