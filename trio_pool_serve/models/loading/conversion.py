"""A model that is loaded by torch, to be converted to OpenVINO's format."""

from functools import partial
from importlib import import_module
from pathlib import Path

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import exported_file
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_messages import ConversionJob
from trio_pool_serve.models.loading.runner_loading import load_parts
from trio_pool_serve.models.loading.sample_prompts import sample_prompts
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.runner.openvino.preparation import Preparation
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.threads.offload import Offload


def load_to_convert(job: ConversionJob) -> Preparation:
    """Load a model and compute a batch by torch. Blocks for seconds. Raises ``ModelLoadError``.

    Its tokenizer is in the cache by then, so that the process which serves the model need not make it.
    """
    for name in job.imports:
        import_module(name)
    config = job.config
    folder = read_model_folder(Path(job.folder), config)
    if folder.kind.load != job.kind:  # it would be converted without its heads
        raise ModelLoadError(
            f"The process that converts the model takes it for {folder.kind.load}, not {job.kind}: its kind "
            f"has to be registered where {job.imports[-1]} is imported. With --backend torch it is not converted."
        )
    load_tokenizer(folder, trust_remote_code=config.trust_remote_code, cache=ModelCache.of(config.cache_dir))
    loaded, runner, params = load_parts(folder, config, Offload())
    return Preparation(
        loaded,
        runner,
        config,
        params,
        sample_prompts=partial(sample_prompts, folder, trust_remote_code=config.trust_remote_code),
        may_time=job.may_time,
        exported=exported_file(folder.transformer_path),
    )
