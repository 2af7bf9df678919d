"""Loading static embeddings: the table, and the modules after it, into a runner that computes with NumPy."""

import numpy as np

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.config.computing_config import GPU_BATCH_TOKENS
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.model_digest import fingerprint_of_loaded
from trio_pool_serve.models.files.safetensors_files import FILE, read_tensors
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.static import Static
from trio_pool_serve.runner.static_runner import StaticRunner, TokenTable
from trio_pool_serve.runner.vector_modules import WITH_WEIGHTS, VectorModule, vector_module
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ComputedBy, Embed, PoolingRequest, Prepare, RenderedPrompt, RunnerFacts, RunnerParams


def open_static(folder: ModelFolder[Static], config: ModelConfig, offload: Offload) -> Prepare:  # noqa: ARG001
    """Load a ``Static`` model. Blocks. Raises ``ModelLoadError``."""
    require(
        config.backend not in ("openvino", "compile"),
        f"--backend {config.backend} does not apply to static embeddings, which NumPy computes.",
    )
    require(config.dtype not in ("int8", "fp8"), f"--dtype {config.dtype} does not apply to static embeddings.")
    spec, place = folder.spec, folder.transformer_path / FILE
    tensors, _ = read_tensors(place)
    layers: list[VectorModule] = []
    try:
        table = TokenTable.of(tensors)
        parameters, width = table.parameters, table.width
        for module in spec.modules[: -1 if spec.normalizes else None]:
            place = module.path
            tensors = read_tensors(place / FILE)[0] if module.name in WITH_WEIGHTS else {}
            layer, width = vector_module(module.name, module.config, tensors, width)
            layers.append(layer)
            parameters += sum(tensor.size for tensor in tensors.values())
    except ValueError as error:
        raise ModelLoadError(f"{place}: {error}.") from error

    def prepare(params: RunnerParams) -> StaticRunner:
        facts = RunnerFacts(
            max_batch_tokens=params.max_batch_tokens or GPU_BATCH_TOKENS,
            pads=False,
            probe_request=PoolingRequest(RenderedPrompt(np.zeros(8, dtype=np.int32)), (Embed(),)),
            dimensions=width,
            computed_by=ComputedBy(
                fingerprint_of_loaded(folder.path, config, (), "float32", as_read=folder.file_states),
                "float32",
                "numpy",
            ),
            requested_dtype="float32",
            device="cpu",
            model_type=folder.model_type,
            parameters=parameters,
            weight_bytes=table.nbytes + 4 * (parameters - table.parameters),
            max_tokens=folder.max_model_len,
            heads="mean of the tokens' rows",
            computation=("by NumPy",),
        )
        return StaticRunner(table, layers, spec.normalizes, facts)

    return prepare
