"""Vectors of texts: a server's, and sentence-transformers'."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import trio_parallel
from attrs import frozen

from benchmarks.servers import open_server

BATCH = 16
"""Texts in a request."""

Vectors: TypeAlias = Mapping[str, npt.NDArray[np.float32]]
"""By text: [dimensions], [vocabulary] of a sparse vector, or [tokens, dimensions] of length 1 each."""


@frozen
class Subject:
    """A model, the task that is measured, and further flags of the server."""

    name: str
    folder: Path
    task: Literal["embed", "token_embed", "sparse_embed"]
    flags: tuple[str, ...] = ()

    def similarity(self, first: Any, second: Any) -> float:
        """Return the product of two vectors, or of each token with the nearest one of ``second`` on average."""
        products = first @ second.T
        return float(products.max(1).mean() if self.task == "token_embed" else products)


def cosine(first: Any, second: Any) -> float:
    """Return the cosine of all numbers of two vectors. Raises ``ValueError`` if their shapes differ."""
    return float(np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second))


async def reference_vectors(subject: Subject, texts: Sequence[str], *, in_fp8: bool = False) -> Vectors:
    """Return what sentence-transformers computes in float32, or in bfloat16 with the server's layers in FP8.

    Cancellation: at once; its process is killed.
    """
    arguments = (str(subject.folder), subject.task, texts, in_fp8)
    rows = await trio_parallel.run_sync(_encode, *arguments, kill_on_cancel=True)
    return {text: _array(subject, row) for text, row in zip(texts, rows, strict=True)}


def _encode(folder: str, task: str, texts: Sequence[str], in_fp8: bool) -> list[npt.NDArray[np.float32]]:  # noqa: FBT001
    import torch
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from transformers.utils import logging

    from trio_pool_serve.runner.cuda.fp8_blocks import quantize_blocks
    from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams

    logging.disable_progress_bar()
    dtype = torch.bfloat16 if in_fp8 else torch.float32
    kind: Any = SparseEncoder if task == "sparse_embed" else SentenceTransformer
    encoder = kind(folder, device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})
    if in_fp8:
        params = LoadingParams(device=torch.device("cpu"), dtype=dtype, pad_token_id=0, max_tokens=512)
        quantize_blocks(Backbone(encoder[0].auto_model), params)
    output: Mapping[str, Mapping[str, Any]] = {
        "embed": {},
        "token_embed": {"output_value": "token_embeddings"},
        "sparse_embed": {"convert_to_sparse_tensor": False},
    }
    rows = encoder.encode(texts, **output[task])
    return [np.asarray(row.float() if isinstance(row, torch.Tensor) else row) for row in rows]


async def served_vectors(subject: Subject, dtype: str, texts: Sequence[str], note: Callable[[], None]) -> Vectors:
    """Return what a server in this precision responds with; ``note`` is called before each request.

    Raises ``ServerFailedError``, in a group, if it refuses the model. Cancellation: at once; the server is stopped.
    """
    command = ["trio_pool_serve", "serve", f"{subject.folder.name}={subject.folder}", *subject.flags, "--dtype", dtype]
    found: dict[str, Any] = {}
    async with (
        open_server(f"{subject.name} in {dtype}", command, ready_path="/readyz") as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=600) as client,
    ):
        for begin in range(0, len(texts), BATCH):
            note()
            batch = texts[begin : begin + BATCH]
            body = {"input": batch, "task": subject.task, "truncate_prompt_tokens": -1}
            answer = (await client.post("/pooling", json=body)).raise_for_status()
            found |= zip(batch, [_array(subject, item["data"]) for item in answer.json()["data"]], strict=True)
    return found


def _array(subject: Subject, row: Any) -> npt.NDArray[np.float32]:
    if subject.task == "sparse_embed" and isinstance(row, list):
        weights = np.zeros(json.loads((subject.folder / "config.json").read_text())["vocab_size"], dtype=np.float32)
        weights[[item["index"] for item in row]] = [item["value"] for item in row]
        return weights
    array = np.asarray(row, dtype=np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True) if subject.task == "token_embed" else array
