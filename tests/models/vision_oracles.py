"""What transformers and sentence-transformers make of the texts and images of ``vision_families``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.models.model_families import reference
from tests.models.vision_families import PICTURES, SENTENCES, towers_of_transformers
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.vision_language import VisionLanguage
from trio_pool_serve.types import Vectors


def dual_encoder_vectors(path: Path, oracle: str) -> Vectors:
    """The vectors of SENTENCES and then of PICTURES, float32, shape (items, dimensions)."""
    if oracle == "transformers":
        return np.concatenate(towers_of_transformers(path))
    theirs = reference(path)
    return np.concatenate([theirs.encode(list(SENTENCES)), theirs.encode(list(PICTURES))])


def chat_template_kwargs(path: Path) -> Mapping[str, Any]:
    """What the folder has its chat template rendered with, to compare with transformers' rendering."""
    spec = read_model_folder(path).spec
    assert isinstance(spec, VisionLanguage)
    assert spec.uses_chat_template
    assert spec.conversation is not None
    assert spec.conversation.structured
    return spec.conversation.options


def last_at_unit_length(states: Sequence[Vectors]) -> Vectors:
    """The vectors of Qwen's embedders: the state of each input's last token, at unit length."""
    last = np.stack([rows[-1] for rows in states])
    return last / np.linalg.norm(last, axis=1, keepdims=True)


def page_vectors(path: Path, oracle: str) -> tuple[list[Vectors], Vectors]:
    """The token vectors of SENTENCES as questions and of PICTURES as pages; the scores of all with all."""
    return _pages_by_transformers(path) if oracle == "transformers" else _pages_by_sentence_transformers(path)


def _pages_by_transformers(path: Path) -> tuple[list[Vectors], Vectors]:
    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path).eval()
    processor = transformers.AutoProcessor.from_pretrained(path)
    vectors = []
    with torch.inference_mode():
        for inputs in (processor.process_queries(list(SENTENCES)), processor.process_images(list(PICTURES))):
            made = model(**inputs).embeddings
            vectors.append([row[mask.bool()] for row, mask in zip(made, inputs["attention_mask"], strict=True)])
    scores = processor.score_retrieval(*vectors).numpy()
    return [row.numpy() for rows in vectors for row in rows], scores


def _pages_by_sentence_transformers(path: Path) -> tuple[list[Vectors], Vectors]:
    from sentence_transformers import MultiVectorEncoder

    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    questions = theirs.encode_query(list(SENTENCES))
    pages = theirs.encode_document(list(PICTURES))
    return [np.asarray(row) for row in [*questions, *pages]], theirs.similarity(questions, pages).numpy()
