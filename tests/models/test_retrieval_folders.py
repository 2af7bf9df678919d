"""What the files of late-interaction, sparse and BGE-M3 models declare, and what is refused of it."""

import string
from pathlib import Path

import pytest

from tests.model_folders import write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding.spec import Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.late_interaction.spec import LateInteraction, QueryExpansion
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.sparse.spec import Sparse
from trio_pool_serve.types import SparseEmbed, SparseLookup

pytestmark = pytest.mark.unit

TRANSFORMER = ("sentence_transformers.base.modules.transformer.Transformer", "")
PYLATE_DENSE = ("pylate.models.Dense.Dense", "1_Dense")
MASK = ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask")
SPLADE = ("sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling", "1_SpladePooling")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_json(path / "config.json", {"model_type": "bert", "vocab_size": 30, "max_position_embeddings": 512})
    return path


def write_modules(folder: Path, *entries: tuple[str, str]) -> None:
    write_json(folder / "modules.json", [{"type": dotted, "path": path} for dotted, path in entries])


def architect(folder: Path, *names: str, **more: object) -> None:
    """Say in config.json which class the weights were saved from."""
    config = {"model_type": "bert", "vocab_size": 30, "max_position_embeddings": 512}
    write_json(folder / "config.json", config | {"architectures": list(names)} | more)


def describe(folder: Path, **texts: object) -> None:
    write_json(folder / "config_sentence_transformers.json", texts)


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
    assert late_interaction(folder).expansion == QueryExpansion(length=32)
    assert read_model_folder(folder).prompts == {"query": "[unused0] ", "document": "[unused1] "}


def test_late_interaction_is_asked_for_token_vectors_and_scores(folder: Path):
    architect(folder, "HF_ColBERT")
    assert late_interaction(folder).tasks == {"token_embed", "score"}
    assert late_interaction(folder).scoring == "late_interaction"


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


@pytest.mark.parametrize("name", ["ColModernVBertForRetrieval", "ColQwen3ForRetrieval"])
def test_models_of_pages_are_refused(folder: Path, name: str):
    architect(folder, name)
    refuse(folder, f"{name} is an unsupported page retriever")


@pytest.mark.parametrize("name", ["ColBERT", "ColBERTModernBertModel"])
def test_a_bare_colbert_that_is_not_known_is_refused_rather_than_pooled(folder: Path, name: str):
    architect(folder, name)
    refuse(folder, "has no projection")


def test_a_bare_model_with_a_colberts_metadata_is_refused_rather_than_pooled(folder: Path):
    write_json(folder / "artifact.metadata", {"doc_maxlen": 90})
    refuse(folder, "has no projection")


POOLED_TOKENS = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"


@pytest.mark.parametrize(
    ("module", "config", "said"),
    [
        ((POOLED_TOKENS, "1"), {}, "with a HierarchicalTokenPooling module"),
        (("sentence_transformers.models.LayerNorm", "1"), {}, "with a LayerNorm module"),
        (("sentence_transformers.models.Pooling", "1"), {}, "with a Pooling module"),
        (("pylate.models.Dense.Dense", "1"), {"module_input_name": "sentence_embedding"}, "Dense maps 'sentence_emb"),
        (("pylate.models.Dense.Dense", "1"), {"module_output_name": "elsewhere"}, "to 'elsewhere'"),
        (("someone.elses.Dense", "1"), {}, "someone.elses.Dense is not one of"),
    ],
)
def test_modules_that_are_not_supported_are_named(folder: Path, module: tuple[str, str], config: object, said: str):
    write_modules(folder, TRANSFORMER, module, MASK)
    write_json(folder / "1" / "config.json", config)
    describe(folder, model_type="MultiVectorEncoder")
    refuse(folder, said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"query_expansion": {"strategy": "double", "length": 8}}, "query_expansion .* is not supported"),
        ({"query_expansion": {"strategy": "fixed"}}, "query_expansion .* is not supported"),
        ({"query_expansion": {"strategy": "min", "length": 8, "side": "left"}}, "query_expansion .* is not supported"),
        (
            {"query_expansion": {"strategy": "min", "length": 8}, "query_length": 7},
            "truncated to 7 tokens but expanded",
        ),
        ({"processing_kwargs": {"text": {"padding": False}}}, "processing_kwargs"),
        ({"transformer_task": "fill-mask"}, "task is 'fill-mask'"),
    ],
)
def test_settings_that_are_not_supported_are_named(folder: Path, settings: object, said: str):
    write_modules(folder, TRANSFORMER, MASK)
    describe(folder, model_type="MultiVectorEncoder")
    write_json(folder / "sentence_bert_config.json", settings)
    refuse(folder, said)


def test_filling_up_on_the_left_is_refused(folder: Path):
    architect(folder, "HF_ColBERT")
    write_json(folder / "tokenizer_config.json", {"padding_side": "left"})
    refuse(folder, "expansion on the left")


def test_an_early_pylate_folder_without_a_projection_is_refused(folder: Path):
    write_modules(folder, TRANSFORMER)
    describe(folder, query_prefix="[Q] ")
    refuse(folder, "no projection for the tokens")


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
    write_modules(folder, TRANSFORMER, ("sentence_transformers.models.Pooling", "1_Pooling"), encoder)
    describe(folder, model_type="SparseEncoder")
    refuse(folder, "Transformer, Pooling, SparseAutoEncoder is not supported")


TABLE = "sentence_transformers.sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"
MLM = "sentence_transformers.sparse_encoder.models.MLMTransformer.MLMTransformer"


def write_router(folder: Path, *, parameters: object = None, **routes: list[str]) -> None:
    """A Router whose transformer lies in the root."""
    types = {"table": TABLE, "table2": TABLE, "": MLM, "mlm2": MLM, "splade": SPLADE[0]}
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
    write_router(folder, query=["table"], document=["", "splade"])
    write_json(folder / "table" / "tokenizer_config.json", {"model_max_length": 77})
    spec = sparse(folder)
    assert spec.sparse_params("query") == SparseLookup()
    assert spec.sparse_params("document") == spec.sparse_params(None) == SparseEmbed()
    assert (spec.table, spec.lookup_length) == (folder / "table", 77)


def test_the_first_route_is_for_texts_without_a_role_if_no_other_is_named(folder: Path):
    write_router(folder, query=["table"], document=["", "splade"], parameters={"default_route": None})
    assert sparse(folder).sparse_params(None) == SparseLookup()


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({"query": ["table"], "document": ["table2"]}, "0 transformers"),
        ({"query": ["", "splade"], "document": ["mlm2", "splade"]}, "2 transformers"),
        ({"query": ["", "splade"], "document": ["", "splade"]}, "one route is a SparseStaticEmbedding"),
        ({"query": ["table"], "passage": ["", "splade"]}, "other routes than query and document"),
        ({"query": ["table"], "document": ["splade", ""]}, "SpladePooling, MLMTransformer is not supported"),
    ],
)
def test_routers_that_are_not_supported_are_refused(folder: Path, routes: dict[str, list[str]], said: str):
    write_router(folder, **routes)
    refuse(folder, said)


def test_a_router_by_modality_is_refused(folder: Path):
    mappings = {"default_route": "document", "route_mappings": {"(None, 'text')": "document"}}
    write_router(folder, query=["table"], document=["", "splade"], parameters=mappings)
    refuse(folder, "route_mappings")


def test_a_router_that_cannot_be_read_is_refused(folder: Path):
    write_modules(folder, ("sentence_transformers.models.Router", ""))
    write_json(folder / "router_config.json", {"types": {"table": TABLE}, "structure": {"query": ["nothing"]}})
    refuse(folder, "Router of .* cannot be read")


def test_a_router_must_not_point_outside_the_folder(folder: Path):
    write_modules(folder, ("sentence_transformers.models.Router", ""))
    write_json(folder / "router_config.json", {"types": {"../elsewhere": TABLE}, "structure": {}})
    refuse(folder, "outside the model's folder")


def test_a_table_with_another_tokenizer_is_refused(folder: Path):
    write_router(folder, query=["table"], document=["", "splade"])
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "truncation": {"max_length": 3}})
    write_json(folder / "table" / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "truncation": None})
    assert sparse(folder).table is not None
    write_json(folder / "table" / "tokenizer.json", {"model": {"vocab": {"b": 0}}, "truncation": None})
    refuse(folder, "another tokenizer")


def test_a_table_in_a_json_file_is_refused(folder: Path):
    write_router(folder, query=["table"], document=["", "splade"])
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
