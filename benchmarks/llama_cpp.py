"""A BERT model computed by llama.cpp's libraries, called by ctypes: there is no wheel with kernels for each CPU.

The libraries are of ``npm pack @node-llama-cpp/linux-x64`` (3.22.1, llama.cpp 0.5.0), which has a set of kernels for
each generation of CPUs. Structures are declared up to the last field that is set, and are longer than llama.h's.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_bool, c_byte, c_char_p, c_float, c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROWS = 8
"""Rows of a call: 64 rows in one call take 1.8 times as long, as each token attends to all and is masked (MiniLM)."""

MOST_TOKENS = ROWS * 512

MEAN = 1
"""LLAMA_POOLING_TYPE_MEAN"""


def _structure(more: int = 0, **fields: Any) -> type[Any]:
    """Return the type of a structure with these fields, and ``more`` bytes behind them."""
    return type("Params", (Structure,), {"_fields_": [*fields.items(), ("rest", c_byte * more)]})


PARAMS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq"),
    *("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type"),
)
ModelParams, ContextParams = _structure(512), _structure(512, **dict.fromkeys(PARAMS, c_int32))
Ints = POINTER(c_int32)
Batch = _structure(
    n_tokens=c_int32, token=Ints, embd=c_void_p, pos=Ints, n_seq_id=Ints, seq_id=POINTER(Ints), logits=POINTER(c_int8)
)

SIGNATURES = {
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_set_embeddings": (None, [c_void_p, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_encode": (c_int32, [c_void_p, Batch]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
}

ignore = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)


def open_gguf(path: str, threads: int, libraries: Path) -> Callable[[Mapping[str, Any]], npt.NDArray[np.float32]]:
    """Return what computes vectors from ``input_ids`` [rows, tokens]. Raises ``OSError``, ``RuntimeError``."""
    names = ("libggml-base.so", "libggml.v*", "libllama.v*")
    *ggml, llama = [ctypes.CDLL(str(next(libraries.glob(name))), ctypes.RTLD_GLOBAL) for name in names]
    ggml[0].ggml_log_set(ignore, None)
    ggml[1].ggml_backend_load_all_from_path(str(libraries).encode())
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

    def compute(arrays: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        ids = arrays["input_ids"]
        return np.concatenate([compute_some(ids[begin : begin + ROWS]) for begin in range(0, len(ids), ROWS)])

    return compute
