"""A model that is loaded by torch, to be converted to OpenVINO's format."""

from functools import partial
from importlib import import_module
from pathlib import Path

from attrs import define, evolve, field

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import exported_file
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_messages import ConversionJob
from trio_pool_serve.models.loading.runner_loading import load_parts
from trio_pool_serve.models.loading.sample_prompts import sample_prompts
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel
from trio_pool_serve.runner.openvino.preparation import Preparation
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.threads.offload import Offload


@define(eq=False)
class Conversion:
    """The conversion of one model in this process."""

    _preparation: Preparation = field(init=False)

    def load(self, job: ConversionJob) -> None:
        """Load the model and compute a batch by torch. Blocks for seconds. Raises ``ModelLoadError``.

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
        offload = Offload(launch=job.streams, cores_shared_by=job.sharers)
        loaded, runner, params = load_parts(folder, config, offload)
        prompts = partial(sample_prompts, folder, trust_remote_code=config.trust_remote_code)
        params = evolve(params, may_time=job.may_time, sample_prompts=prompts)
        self._preparation = Preparation(loaded, runner, config, params, exported_file(folder.transformer_path))

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder, as ``Preparation.convert``."""
        return self._preparation.convert(folder)

    def close(self) -> None:
        """Do nothing: what it holds goes with it."""
