"""A BERT model computed by llama.cpp's libraries, called by ctypes: there is no wheel with kernels for each CPU.

The libraries are of ``npm pack @node-llama-cpp/linux-x64`` (3.22.1, llama.cpp 0.5.0), which has a set of kernels for
each generation of CPUs. Structures are declared up to the last field that is set, and are longer than llama.h's.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_byte, c_char_p, c_float, c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

ROWS = 8
"""Rows of a call: 64 rows in one call take 1.8 times as long, as each token attends to all and is masked (MiniLM)."""

MOST_TOKENS = ROWS * 512

MEAN = 1
"""LLAMA_POOLING_TYPE_MEAN"""


class _ModelParams(Structure):
    _fields_: ClassVar = [("rest", c_byte * 512)]


class _ContextParams(Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max")),
        *((name, c_int32) for name in ("n_outputs_max_per_seq", "n_threads", "n_threads_batch", "ctx_type")),
        *((name, c_int32) for name in ("rope_scaling_type", "pooling_type")),
        ("rest", c_byte * 512),
    ]


class _Batch(Structure):
    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


SIGNATURES = {
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_set_embeddings": (None, [c_void_p, c_bool]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_encode": (c_int32, [c_void_p, _Batch]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
}

ignore = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)


def open_gguf(libraries: Path, path: str, threads: int) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]:
    """Return what computes vectors [rows, dimensions] from ids [rows, tokens]. Raises ``OSError``, ``RuntimeError``."""
    ctypes.CDLL(str(libraries / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    (ggml,) = libraries.glob("libggml.v*.so")
    ctypes.CDLL(str(ggml), mode=ctypes.RTLD_GLOBAL).ggml_backend_load_all_from_path(str(libraries).encode())
    llama: Any = ctypes.CDLL(str(next(libraries.glob("libllama.v*.so"))))
    for name, (restype, argtypes) in SIGNATURES.items():
        getattr(llama, name).restype, getattr(llama, name).argtypes = restype, argtypes
    llama.llama_log_set(ignore, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = MOST_TOKENS
    params.n_seq_max, params.pooling_type = ROWS, MEAN
    params.n_threads = params.n_threads_batch = threads
    context = llama.llama_init_from_model(model, params) if model else None
    if not context:
        raise RuntimeError(f"llama.cpp does not load {path}")
    llama.llama_set_embeddings(context, True)  # noqa: FBT003
    batch, dimensions = llama.llama_batch_init(MOST_TOKENS, 0, 1), llama.llama_model_n_embd(model)

    def compute_some(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        for place, ((row, position), token) in enumerate(np.ndenumerate(ids)):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, row, 1
        batch.n_tokens = ids.size
        if llama.llama_encode(context, batch):
            raise RuntimeError("llama_encode failed")
        found = [llama.llama_get_embeddings_seq(context, row) for row in range(len(ids))]
        return np.array([np.ctypeslib.as_array(vector, (dimensions,)) for vector in found])

    def compute(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return np.concatenate([compute_some(ids[begin : begin + ROWS]) for begin in range(0, len(ids), ROWS)])

    return compute
