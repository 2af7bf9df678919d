"""Each family's values are those of its oracle, whatever batch an input is computed in."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import define

from tests.models import classifier_families
from tests.models.adapter_folders import ADAPTERS, write_adapted
from tests.models.classifier_families import PAIRS, POOLED, PROMPTS, cross_encoder, write_classifier
from tests.models.model_families import (
    LAYOUTS,
    LOADED_BY_ORACLE,
    TEXTS,
    ServedModel,
    edit_json,
    reference,
    shuffled,
    write_family,
)
from tests.models.retrieval_families import (
    DOCUMENTS,
    LATE_INTERACTION,
    MASKED_LMS,
    QUERIES,
    SPARSE,
    assert_same_ranking,
    relative_difference,
    write_masked_lm,
)
from tests.models.static_families import STATIC, static_reference
from tests.models.vision_families import (
    CONTENTS,
    DUAL_ENCODERS,
    PAGE_RETRIEVERS,
    PICTURES,
    SENTENCES,
    VISION_LANGUAGE,
    SeeingModel,
    qwen_states,
)
from tests.models.vision_oracles import chat_template_kwargs, dual_encoder_vectors, last_at_unit_length, page_vectors
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of
from trio_pool_serve.models.token_pooling import pool_rows
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.types import (
    Batch,
    Classify,
    Embed,
    EmbedChunks,
    MaxSim,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseVector,
    TokenEmbed,
    Vectors,
)

Record = Callable[..., None]


@define(eq=False)
class Agreement:
    """A folder that is served here, with rows to compute and the oracle's value of each of them."""

    ours: ServedModel
    requests: list[PoolingRequest]
    expected: Sequence[Any]
    oracle: str = "sentence-transformers"
    tolerance: float = 1e-5
    most_alike: float | None = None
    """Upper bound of the cosine of any two vectors: else agreement would prove nothing."""
    scores: Vectors | None = None
    """Of all queries, which come first, with all documents behind them."""
    queries: int = 0
    finish: Callable[[int, Any], Any] = lambda _, value: value
    """What the server makes of the value of a row, by its index."""


def asked(prompts: Sequence[RenderedPrompt], *params: PoolingParams) -> list[PoolingRequest]:
    return [PoolingRequest(prompt, params) for prompt in prompts]


async def embedding(path: Path, write: Callable[..., Path], **for_oracle: object) -> Agreement:
    oracle = write(path.with_name("oracle"), **for_oracle)
    ours, theirs, texts = ServedModel(write(path)), reference(oracle), list(TEXTS)
    requests = await ours.requests(TEXTS) + await ours.requests(TEXTS, instruction=ours.folder.prompts["query"])
    expected = np.concatenate([theirs.encode(texts), theirs.encode(texts, prompt_name="query")])
    assert f"{ours.runner.facts.dimensions} dimensions" in str(ours.runner.facts)
    return Agreement(ours, requests, expected, most_alike=0.99)


async def mean_at_unit_length(path: Path, name: str) -> Agreement:
    """A model whose processor sentence-transformers cannot load without torchvision."""
    ours = ServedModel(write_family(path, name))
    model = transformers.AutoModel.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = []
    for prompt in ("", ours.folder.prompts["query"]):
        for text in TEXTS:
            ids = tokenizer(prompt + text, truncation=True, max_length=ours.folder.max_model_len, return_tensors="pt")
            with torch.inference_mode():
                mean = model(**ids).last_hidden_state.mean(dim=1)
            expected.append(torch.nn.functional.normalize(mean)[0].numpy())
    requests = await ours.requests(TEXTS) + await ours.requests(TEXTS, instruction=ours.folder.prompts["query"])
    return Agreement(ours, requests, np.stack(expected), "transformers", most_alike=0.99)


async def static(path: Path, name: str) -> Agreement:
    ours, theirs = ServedModel(STATIC[name](path)), static_reference(path)
    query = ours.folder.prompts.get("query", "")
    requests = await ours.requests(TEXTS) + await ours.requests(TEXTS, instruction=query)
    requests += await ours.requests(TEXTS, EmbedChunks())  # the chunk of a text without any is all of it
    expected = np.concatenate([theirs.encode(list(TEXTS)), theirs.encode([query + text for text in TEXTS])])
    expected = [*expected, *expected[: len(TEXTS), None]]
    return Agreement(ours, requests, expected)


async def states(path: Path, write: Callable[[Path], Path]) -> Agreement:
    """The tokens' states, before they are pooled."""
    ours, texts = ServedModel(write(path)), list(TEXTS)
    expected = reference(path).encode(texts, output_value="token_embeddings")
    return Agreement(ours, await ours.requests(TEXTS, TokenEmbed()), [row.numpy() for row in expected])


async def judge(path: Path, write: Callable[[Path], Path], tolerance: float = 1e-4) -> Agreement:
    """A cross-encoder: scores, and logits of pairs with an instruction."""
    path = write(path)
    ours, theirs = ServedModel(path), cross_encoder(path)
    raw = theirs.predict(PAIRS, activation_fn=torch.nn.Identity(), prompt="find: ")
    scores = theirs.predict(PAIRS)
    assert np.ptp(scores) > 0.01, "agreement would prove nothing"
    requests = await ours.requests(PROMPTS, Classify("score"))
    requests += await ours.requests(PROMPTS, Classify("raw"), instruction="find: ")
    return Agreement(ours, requests, np.concatenate([scores, raw]).reshape(len(requests), -1), tolerance=tolerance)


TEXTS_OF: Mapping[InputType | None, Sequence[str]] = {"query": QUERIES, "document": DOCUMENTS, None: DOCUMENTS}


async def asked_by_type(ours: ServedModel, params_of: Callable[[InputType | None], PoolingParams]) -> Any:
    """Texts of each input type, and texts without one."""
    return [
        request
        for input_type, texts in TEXTS_OF.items()
        for request in await ours.ask(texts, [(params_of(input_type),)] * len(texts), input_type)
    ]


def encoded_by_type(theirs: Any, **options: Any) -> list[list[Vectors]]:
    encoders = {"query": theirs.encode_query, "document": theirs.encode_document, None: theirs.encode}
    return [encode(list(TEXTS_OF[input_type]), **options) for input_type, encode in encoders.items()]


def pooling_of(ours: ServedModel, types: Sequence[InputType | None]) -> Callable[[int, Vectors], Vectors]:
    """Pool the vectors of a row, whose input type is among ``types``, if the model does."""
    pooling = ours.folder.spec.token_pooling
    return lambda row, of_row: pool_rows(of_row, pooling) if pooling and pooling.applies_to(types[row]) else of_row


async def late_interaction(path: Path, write: Callable[[Path], Path]) -> Agreement:
    from sentence_transformers import MultiVectorEncoder

    path = write(path)
    ours, theirs = ServedModel(path), MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    assert ours.folder.prompts == {name: text for name, text in theirs.prompts.items() if text is not None}
    queries, documents, others = encoded_by_type(theirs)
    types = [input_type for input_type, texts in TEXTS_OF.items() for _ in texts]
    return Agreement(
        ours,
        await asked_by_type(ours, lambda _: TokenEmbed()),
        [vectors.numpy() for vectors in (*queries, *documents, *others)],
        scores=None if ours.folder.spec.token_pooling else theirs.similarity(queries, documents).numpy(),
        queries=len(queries),
        finish=pooling_of(ours, types),
    )


async def sparse(path: Path, write: Callable[[Path], Path]) -> Agreement:
    from sentence_transformers import SparseEncoder

    path = write(path)
    ours, theirs = ServedModel(path), SparseEncoder(str(path), device="cpu", local_files_only=True)
    expected = torch.cat(encoded_by_type(theirs, convert_to_sparse_tensor=False)).numpy()
    return Agreement(ours, await asked_by_type(ours, ours.folder.spec.sparse_params), expected)


async def dual_encoder(path: Path, name: str, oracle: str) -> Agreement:
    DUAL_ENCODERS[name](path)
    ours, items = SeeingModel(path), [*SENTENCES, *PICTURES]
    return Agreement(ours, await ours.requests(items), dual_encoder_vectors(path, oracle), oracle, most_alike=0.999)


async def vision_language(path: Path, name: str, params: PoolingParams) -> Agreement:
    """The oracle pads on the left, as Qwen's tokenizers do; here rows are padded on the right."""
    VISION_LANGUAGE[name](path)
    ours, options = SeeingModel(path), chat_template_kwargs(path)
    instruction = ours.folder.prompts["query"]
    prompts = [ours.in_conversation(content) for content in CONTENTS]
    prompts += [ours.in_conversation(content, instruction=instruction) for content in CONTENTS[:3]]
    states = qwen_states(path, CONTENTS, **options)
    states += qwen_states(path, CONTENTS[:3], instruction=instruction, **options)
    if isinstance(params, TokenEmbed):  # states are not of unit length
        return Agreement(ours, asked(prompts, params), states, "transformers", 1e-4)
    return Agreement(ours, asked(prompts, params), last_at_unit_length(states), "transformers", most_alike=0.999)


async def page_retrieval(path: Path, name: str, oracle: str) -> Agreement:
    PAGE_RETRIEVERS[name](path)
    ours, items = SeeingModel(path), [*SENTENCES, *PICTURES]
    requests = await ours.requests(items, TokenEmbed(), input_type="query")
    expected, scores = page_vectors(path, oracle)
    assert min(np.ptp(scores, axis=1).min(), np.ptp(scores, axis=0).min()) > 0.01, "agreement would prove nothing"
    types: list[InputType | None] = ["query"] * len(SENTENCES) + ["document"] * len(PICTURES)
    return Agreement(
        ours,
        requests,
        expected,
        oracle,
        scores=None if ours.folder.spec.token_pooling else scores,
        queries=len(SENTENCES),
        finish=pooling_of(ours, types),
    )


BY_ST = "sentence-transformers"
WEIGHTED = "bert_with_weighted_layers"
BY_BOTH = ("clip", "clip_of_today")
BY_SENTENCE_TRANSFORMERS = ("clip_of_sentence_transformers", "clip_with_heads", "siglip_with_modules")

OF_KIND: Mapping[str, Callable[..., Awaitable[Agreement]]] = {
    "embed": embedding, "score": judge, "token_embed": late_interaction, "sparse_embed": sparse
}  # fmt: skip

CASES: Mapping[tuple[str, ...], Callable[[Path], Awaitable[Agreement]]] = {
    **{
        ("embed", name): partial(embedding, write=partial(write_family, name=name), as_published=False)
        for name in LOADED_BY_ORACLE
    },
    ("embed", "embeddinggemma2", "transformers"): partial(mean_at_unit_length, name="embeddinggemma2"),
    **{("embed", name, "sentence-transformers"): partial(static, name=name) for name in STATIC},
    **{("embed", name, BY_ST): partial(embedding, write=write) for name, write in LAYOUTS.items()},
    ("token_embed", WEIGHTED, BY_ST): partial(states, write=LAYOUTS[WEIGHTED]),
    **{
        ("score", name): partial(judge, write=partial(write_classifier, name=name, num_labels=1))
        for name in classifier_families.FAMILIES
    },
    **{
        ("classify" if name.endswith("labels") else "score", name, BY_ST): partial(judge, write=write, tolerance=1e-5)
        for name, write in POOLED.items()
    },
    **{("token_embed", name): partial(late_interaction, write=write) for name, write in LATE_INTERACTION.items()},
    **{("sparse_embed", name): partial(sparse, write=write) for name, write in SPARSE.items()},
    **{
        (adapter.task, f"LoRA on {name}", "sentence-transformers with peft"): partial(
            OF_KIND[adapter.task], write=partial(write_adapted, name=name)
        )
        for name, adapter in ADAPTERS.items()
    },
    **{
        ("embed", name, oracle): partial(dual_encoder, name=name, oracle=oracle)
        for name in DUAL_ENCODERS
        for oracle in ("transformers", "sentence-transformers")
        if name in BY_BOTH or (name in BY_SENTENCE_TRANSFORMERS) == (oracle == "sentence-transformers")
    },
    **{
        (task, name, "transformers"): partial(vision_language, name=name, params=params)
        for name in VISION_LANGUAGE
        for task, params in (("embed", Embed()), ("token_embed", TokenEmbed()))
    },
    **{
        ("token_embed", name, oracle): partial(page_retrieval, name=name, oracle=oracle)
        for name in PAGE_RETRIEVERS
        for oracle in ("transformers", "sentence-transformers")
        if name in ("colqwen2", "colpali") or oracle == "sentence-transformers"
    },
}
"""By task and family; and by oracle, if the difference is recorded."""

SLOW = ("qwen2_vl_of_old", "qwen2_5_vl")


def difference(ours: Any, expected: Vectors) -> float:
    """The largest difference; of sparse vectors in parts of the weight where that is above 1."""
    if isinstance(ours, SparseVector):
        assert (ours.values != 0).all()
        assert (np.diff(ours.indices) > 0).all()
        weights = np.zeros_like(expected)
        weights[ours.indices] = ours.values
        return relative_difference(weights, expected)
    assert ours.shape == expected.shape
    return float(np.abs(ours - expected).max(initial=0))


async def farthest(found: Agreement, rows: Sequence[int]) -> float:
    """The largest difference of some rows that are computed in one batch."""
    values = await found.ours.runner.launch(Batch(tuple(found.requests[row] for row in rows)))
    pairs = zip(values, rows, strict=True)
    return max(difference(found.finish(row, value), found.expected[row]) for (value,), row in pairs)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case[1] in SLOW else (), id="-".join(case)) for case in CASES]
)
async def test_values_are_the_oracle_s_alone_and_in_any_batch(
    case: tuple[str, ...], tmp_path: Path, record_agreement: Record
):
    found = await CASES[case](tmp_path / "model")
    all_rows = range(len(found.requests))
    differences = [await farthest(found, [row]) for row in all_rows]
    differences.append(await farthest(found, shuffled(all_rows)))
    # At last each kind alone: a model remembers where the last image put its positions.
    for has_images in (True, False):
        rows = [row for row in all_rows if (found.requests[row].prompt.images is not None) == has_images]
        differences += [await farthest(found, rows)] if rows else []
    assert max(differences) < found.tolerance
    if found.most_alike is not None:
        unit = found.expected / np.linalg.norm(found.expected, axis=1, keepdims=True)
        cosines = np.triu(unit @ unit.T, 1)
        assert cosines[: len(TEXTS), : len(TEXTS)].max() < found.most_alike
    described = str(found.ours.runner.facts)
    assert found.ours.folder.model_type in described
    assert "float32 on cpu" in described
    if case[0] in ("embed", "token_embed"):
        assert found.ours.runner.facts.dimensions == found.expected[0].shape[-1]
    if len(case) > 2:
        record_agreement(case[1], case[0], case[2], max(differences))
    if found.scores is not None:
        differs = await scores_differ(found)
        assert differs < 1e-4
        if len(case) > 2:
            record_agreement(case[1], "score", case[2], differs)


async def scores_differ(found: Agreement) -> float:
    """Score all queries against all documents in two batches, require the same ranking, and compare the scores."""
    assert found.scores is not None
    documents = found.requests[found.queries : found.queries + found.scores.shape[1]]
    queries = await found.ours.runner.launch(Batch(tuple(found.requests[: found.queries])))
    params = tuple(MaxSim(vectors) for (vectors,) in queries)
    rows = await found.ours.runner.launch(Batch(tuple(asked([each.prompt for each in documents], *params))))
    scores = np.array([[score[0] for score in row] for row in rows]).T
    assert_same_ranking(scores, found.scores)
    return float(np.abs(scores - found.scores).max())


SEEING = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VISION_LANGUAGE]
)


def of_embeds(embeds: Any) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.zeros(len(embeds), np.int32), embeds=embeds.detach().numpy()), (Embed(),))


@SEEING
async def test_embeddings_in_place_of_ids_agree_alone_and_beside_images(
    name: str, tmp_path: Path, record_agreement: Record
):
    found = await vision_language(tmp_path / "model", name, Embed())
    runner, whole = found.ours.runner, len(found.requests)
    assert isinstance(embeds_format_of(found.ours.folder, runner.facts.embeds_width, enabled=True), EmbedsFormat)
    texts = [row for row, request in enumerate(found.requests) if request.prompt.images is None]
    assert 0 < len(texts) < whole
    ids = [torch.from_numpy(found.requests[row].prompt.token_ids.astype(np.int64)) for row in texts]
    found.requests += [of_embeds(runner.loaded.backbone.embed(of_text)) for of_text in ids]
    found.expected = np.concatenate([found.expected, found.expected[texts]])
    differences = [await farthest(found, [row]) for row in range(whole, len(found.requests))]
    differences.append(await farthest(found, shuffled(found.requests)))
    assert max(differences) < found.tolerance
    record_agreement(name, "embed", "transformers", max(differences))


@SEEING
async def test_the_embedding_of_the_placeholder_fails_no_batch(name: str, tmp_path: Path):
    """A client can send what the model has in the place of an image; the model takes it for one.

    No video is read: a placeholder for one is a token like others.
    """
    found = await vision_language(tmp_path / "model", name, Embed())
    ours: Any = found.ours
    hostile = of_embeds(ours.runner.loaded.backbone.embed(torch.tensor([ours.images.token_id] * 3)))
    (video,) = asked([ours.in_conversation(["what is <|video_pad|> here"])], Embed())
    assert transformers.AutoConfig.from_pretrained(ours.path).video_token_id in video.prompt.token_ids
    _, _, *rows = [vector for (vector,) in await ours.runner.launch(Batch((hostile, video, *found.requests)))]
    assert max(map(difference, rows, found.expected)) < found.tolerance


@SEEING
async def test_a_bare_folder_that_sees_is_pooled_by_mean(name: str, tmp_path: Path):
    path = VISION_LANGUAGE[name](tmp_path / "bare")
    for file in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (path / file).unlink()
    ours = SeeingModel(path)
    batch = Batch(tuple(asked([ours.in_conversation(content) for content in CONTENTS], Embed())))
    rows = [vector for (vector,) in await ours.runner.launch(batch)]
    means = [states.mean(axis=0) for states in qwen_states(path, CONTENTS)]
    assert max(map(difference, rows, means)) < 1e-4


@pytest.mark.parametrize("name", MASKED_LMS)
async def test_a_bare_masked_language_model_is_sparse_if_the_operator_says_so(
    name: str, tmp_path: Path, record_agreement: Record
):
    from sentence_transformers import SparseEncoder

    path = write_masked_lm(tmp_path / name, name)
    ours = ServedModel(path, settings={"task": "sparse_embed"})
    rows = await ours.compute(DOCUMENTS, SparseEmbed())
    expected = SparseEncoder(str(path), device="cpu").encode_document(list(DOCUMENTS), convert_to_sparse_tensor=False)
    farthest_row = max(map(difference, rows, expected.numpy()))
    assert farthest_row < 1e-5
    record_agreement(f"{name} masked language model", "sparse_embed", "SparseEncoder", farthest_row)


async def test_a_prompt_of_a_dual_encoder_agrees_and_a_vector_is_cut_before_it_is_normalised(tmp_path: Path):
    ours = SeeingModel(DUAL_ENCODERS["clip_with_heads"](tmp_path / "clip"))
    found = await ours.compute(SENTENCES, Embed(dimensions=8, normalize=True), ours.folder.prompts["query"])
    expected = reference(ours.path).encode(list(SENTENCES), prompt_name="query")[:, :8]
    assert np.abs(found - expected / np.linalg.norm(expected, axis=1, keepdims=True)).max() < 1e-5


@pytest.mark.parametrize("lower_case", [False, True])
async def test_lower_casing_agrees(tmp_path: Path, *, lower_case: bool):
    path = write_family(tmp_path / "cased", "roberta", do_lower_case=lower_case)
    texts = ["A Nursery OWNS Its Tasks.", "a nursery owns its tasks."]
    rows = await ServedModel(path).embed(texts)
    assert np.abs(rows - reference(path).encode(texts)).max() < 1e-5
    assert np.array_equal(rows[0], rows[1]) == lower_case


async def test_a_transformer_in_a_folder_of_its_own_agrees(minilm: Path, tmp_path: Path):
    nested = write_family(tmp_path / "nested", "bert")
    inner = nested / "0_Transformer"
    inner.mkdir()
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json")
    for name in names:
        (nested / name).rename(inner / name)
    edit_json(nested / "modules.json", lambda entries: entries[0].update(path=inner.name))
    for path in (nested, minilm):
        assert np.abs(await ServedModel(path).embed(TEXTS) - reference(path).encode(list(TEXTS))).max() < 1e-5
