"""Loading text models on CPU: with OpenVINO from the cached conversion, without torch; other models with torch.

A model without a cached conversion is converted in another process. Refusals to use OpenVINO are cached, too.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import AdapterError, ModelLoadError, StorageError, install_extra, require
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.models.files.exported_files import parts_of, why_not_torch
from trio_pool_serve.models.files.model_digest import file_states, fingerprint_of_loaded, model_entry
from trio_pool_serve.models.folder import locate_folder
from trio_pool_serve.models.loading.converter import (
    ChildConverter,
    ConversionJob,
    Converter,
    MakeConverter,
)
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.allocator import resident_bytes
from trio_pool_serve.runner.adapter_store import AdapterStore
from trio_pool_serve.runner.batch_rows import ONE_LENGTH
from trio_pool_serve.runner.cpu_features import cpu_name, dtype_on_cpu, has_native_bfloat16
from trio_pool_serve.runner.openvino.converted_model import (
    LONGEST_COMPARED,
    ConvertedModel,
    UnusableGraphError,
    is_near,
)
from trio_pool_serve.runner.openvino.trial import BatchesTrial, rows_per_s, try_batches
from trio_pool_serve.runner.shared_cores import usable_cores
from trio_pool_serve.storage.model_cache import CacheEntry, ModelCache, installed_versions, written
from trio_pool_serve.telemetry.start_display import report_step
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Adapter, ComputedBy, PoolingRequest, Prepare, Runner, RunnerParams

logger = logging.getLogger(__name__)

CHECK_SLACK = {"float32": 0.005, "bfloat16": 0.1, "int8": 0.2}
"""How much a number of a short row's output may differ from the recorded one, relative to the row's largest."""

FLOAT16 = (
    "--dtype float16: CPUs compute it slowly, and %s is computed in %s instead. --dtype auto does the same without "
    "this warning; --dtype float32 is more exact than float16."
)

LoadByTorch = Callable[[AnyModelFolder, ModelConfig, Offload, str], Prepare]
"""Loads a model with torch; the last argument is the reason why torch computes it."""


@define(eq=False)
class CpuModel:
    """One model that OpenVINO may compute."""

    folder: AnyModelFolder
    config: ModelConfig
    offload: Offload
    load_by_torch: LoadByTorch
    make_converter: MakeConverter = ChildConverter.loaded
    entry: CacheEntry | None = field(init=False, default=None)
    """The entry of its conversion in the cache; ``None`` without a cache."""
    parts: Sequence[Path] = field(init=False, default=())
    """The exported file and its weights, if torch cannot load the model."""

    def open(self) -> Prepare:
        """Load the model if it is converted; the returned function converts it otherwise. Blocks for seconds.

        Raises ``ModelLoadError``.
        """
        if self.config.dtype == "float16":
            logger.warning(FLOAT16, self.folder.path.name, self._dtype)
        if self.config.backend not in ("auto", "openvino"):
            return self.load_by_torch(self.folder, self.config, self.offload, "as configured")
        if reason := self._why_not_openvino():
            return self._by_torch(reason)
        self.entry = self._entry()
        if (prepare := self._read()) is not None:
            return prepare
        if reason := why_not_torch(self.folder.transformer_path):
            return self._open_exported(reason)
        try:
            converter = self.make_converter(self._job())
        except OSError as error:  # no processes or no memory
            return self._by_torch(f"the process that converts it cannot be started: {error}")
        return lambda params: self._convert(converter)(params)

    def _why_not_openvino(self) -> str:
        """Return why OpenVINO does not compute the model in any case; empty if it may."""
        if find_spec("openvino") is None:
            return "OpenVINO is not installed"
        if self.folder.reads_images:
            return "OpenVINO is not used for models that read images"
        if self.folder.kind.read.__module__ == "__main__":
            return "OpenVINO is not used for kinds of models that a program itself registers"
        if self._dtype == "bfloat16" and not has_native_bfloat16():
            # It computes it all the same, 14 times slower than torch (MiniLM, AVX512 without BF16).
            return "OpenVINO is used for bfloat16 only where the CPU computes it natively"
        return ""

    def _entry(self) -> CacheEntry | None:
        """Return the entry of the conversion."""
        if (cache := ModelCache.of(self.config.cache_dir)) is None:
            return None
        config, folder = self.config, self.folder
        settings = [config.task, config.pooling, config.normalize, config.pooler_config, config.trust_remote_code]
        try:
            settings += cache.digest(self.parts).values()
            # The conversion is compared with torch on rows of up to this many tokens.
            longest = min(LONGEST_COMPARED, folder.max_model_len)
            # Unless bfloat16 is asked for, float32 replaces it where its output differs.
            dtype = "only bfloat16" if config.dtype == "bfloat16" else self._dtype
            return model_entry(
                folder.path,
                cache,
                *map(str, ("model compared on its own inputs", folder.kind.load, dtype, longest, *settings)),
            )
        except OSError as error:
            logger.warning("the converted model cannot be cached: %s", error)
            return None

    @staticmethod
    def _found_here(entry: CacheEntry, what: str, *key: str) -> CacheEntry:
        """Return the entry of a finding for this kind of CPU; another may have converted the model."""
        return entry.cache.entry(f"{entry.name[: 39 - len(what)]}-{what}", entry.key, cpu_name(), *key)

    @property
    def _dtype(self) -> str:
        return "int8" if self.config.dtype == "int8" else dtype_on_cpu(self.config.dtype)

    def _open_exported(self, reason: str) -> Prepare:
        """Load or convert an exported file, as torch cannot load the model. Raises ``ModelLoadError``."""
        # Imported here: an optional dependency.
        from trio_pool_serve.models.loading.exported_model import ExportedModel, file_to_convert

        file = file_to_convert(self.folder, self._dtype, reason)
        self.parts = parts_of(file)
        states = {**file_states(self.folder.path, self.parts), **self.folder.file_states}
        self.folder = evolve(self.folder, file_states=states)
        self.entry = self._entry()
        if (prepare := self._read()) is not None:
            return prepare
        exported = ExportedModel(self.folder, file, self._dtype, reason)
        return lambda params: self._convert(exported)(params)

    def _convert(self, converter: Converter) -> Prepare:
        with closing(converter), nullcontext() if self.entry is None else self.entry.locked():
            if (prepare := self._read()) is not None:  # another process was faster
                return prepare
            takes_long = ", in int8: this takes a while" if self._dtype == "int8" else ""
            logger.info("converting %s for OpenVINO%s", self.folder.path.name, takes_long)
            try:
                with written(partial(self._write, converter), self.entry) as (path, model):
                    converter.close()  # its memory is free before the model is loaded
                    return self._load(path, model)
            except UnusableGraphError as refusal:
                reason = str(refusal).rstrip(".")
                if self.entry is not None:
                    refused = ConvertedModel(what=f"computed by torch: {reason}", refused=reason)
                    self._found_here(self.entry, "refused").put(lambda _: refused)
            except (OSError, StorageError) as error:
                reason = f"it cannot be converted now: {error}"
        return self._by_torch(reason)

    def _write(self, converter: Converter, folder: Path) -> ConvertedModel:
        """Convert as ``Converter.convert``. Raises ``StorageError`` rather than write other files' conversion."""
        model = converter.convert(folder)
        if self.entry is not None and folder.parent == self.entry.cache.folder and self._entry() != self.entry:
            raise StorageError("the model's files have been changed meanwhile")
        return model

    def _job(self) -> ConversionJob:
        require(
            self._dtype != "int8" or find_spec("nncf") is not None,
            f"--dtype int8 requires more packages. {install_extra('int8')}",
        )
        return ConversionJob.of(self.folder, self.config, may_time=not self.offload.is_serving)

    def _read(self) -> Prepare | None:
        """Load the cached conversion; return ``None`` if there is none, or if it computes something else."""
        if self.entry is None:
            return None
        refused = self._found_here(self.entry, "refused").read(ConvertedModel)
        if refused is not None and refused.is_current():
            return self._by_torch(refused.refused)
        model = self.entry.read(ConvertedModel)
        if model is None or not model.is_current():
            return None
        if model.is_old() and self._can_choose and not self.offload.is_serving and os.access(self.entry.path, os.W_OK):
            return None
        try:
            return self._load(self.entry.path, model)
        except (RuntimeError, OSError, ValueError) as error:
            logger.warning(
                "the converted model in %s cannot be used, and is converted again: %s",
                self.entry.path,
                repr(error).splitlines()[0][:200],
            )
            return None

    def _load(self, folder: Path, model: ConvertedModel) -> Prepare:
        if reason := self._why_torch(model):
            return self._by_torch(reason)
        # Imported here: an optional dependency.
        from trio_pool_serve.runner.openvino.graph_adapters import GraphAdapters
        from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
        from trio_pool_serve.runner.openvino.programs import PRECISIONS, CompileParams

        offload, check, dtype, cores = self.offload, model.check, model.dtype_of(self._dtype), usable_cores()
        assert check is not None  # noqa: S101  (it was converted)

        def measure(batches: int) -> float:
            runner = OpenVinoRunner.of_folder(
                folder, model, CompileParams(PRECISIONS[dtype], cores // batches, batches)
            )
            return rows_per_s(runner.launch, PoolingRequest(check.prompt, (model.compared[0],)), batches, cores)

        chosen = self._choose_batches(measure, cores)
        params = CompileParams(PRECISIONS[dtype], cores, offload.launch, offload.cores_shared_by, offload.idle_launches)
        runner = OpenVinoRunner.of_folder(folder, model, params, takes_adapters=True, **self._facts(model, chosen))
        require(
            is_near(runner.value_of(check.prompt), check.value, CHECK_SLACK[dtype]),
            "its output for a short row differs",
            ValueError,
        )
        adapters = GraphAdapters(runner.programs, model.modules, read_adapter)
        if self._can_choose and (reason := self._why_not_adapters(adapters.store)):
            return self._by_torch(reason)

        def prepare(params: RunnerParams) -> Runner:
            for_embeds = self._load_for_embeds(model) if params.takes_embeds else None
            facts = evolve(
                runner.facts,
                max_batch_tokens=params.max_batch_tokens or runner.facts.max_batch_tokens,
                embeds_width=0 if for_embeds is None else for_embeds.facts.embeds_width,
            )
            return evolve(runner, facts=facts, adapters=adapters, for_embeds=for_embeds)

        return prepare

    def _load_for_embeds(self, model: ConvertedModel) -> Runner | None:
        """Load the model by torch for rows of token embeddings, if it takes any. Blocks. Raises ``ModelLoadError``."""
        require(
            model.embeds_width is not None,
            "--enable-prompt-embeds: torch computes token embeddings, and cannot load this model.",
        )
        if not model.embeds_width:
            return None
        before = resident_bytes()
        runner = self.load_by_torch(self.folder, self.config, self.offload, "token embeddings")(RunnerParams())
        took = (resident_bytes() - before) / 2**20
        logger.info("--enable-prompt-embeds: torch computes token embeddings, which takes %.0f MiB", took)
        return runner

    def _why_not_adapters(self, store: AdapterStore[Any]) -> str:
        """Return why OpenVINO cannot apply an adapter of the model; empty if it can."""
        named = (locate_folder(each.partition("=")[2]) for each in self.config.adapter)
        try:
            for folder in (*named, *self.folder.task_adapters.values()):
                store.get(Adapter(str(folder.absolute()), read_adapter(folder).digest))
        except AdapterError as error:
            return str(error)
        except ModelLoadError:
            pass  # whatever computes the model: it is refused by its name when it is checked
        return ""

    def _choose_batches(self, measure: Callable[[int], float], cores: int) -> str:
        """Measure or read how many batches at a time are best, and set it for this process; return the reason."""
        offload, model = self.offload, self.entry
        # With up to four cores, each has a batch by default.
        if model is None or not offload.may_launch_more or offload.is_serving or not 1 < offload.launch < cores:
            return ""
        offload.may_launch_more = False  # models that share the cores have the same number
        key = f"{offload.launch} to {cores}", *installed_versions("openvino").values()
        entry = self._found_here(model, "batches", *key)
        with entry.locked():  # it takes seconds: once for each kind of machine, and only if it can be kept
            trial = entry.read(BatchesTrial)
            if trial is None and os.access(model.cache.folder, os.W_OK):
                why = "other programs disturbed the trial of more batches"
                report_step("measuring how many batches at a time are best")
                try:
                    trial = try_batches(measure, cores, offload.launch)
                except Exception as error:  # the model is served without a trial
                    why = f"the trial of more batches failed: {error!r:.200}"
                if trial is not None:
                    entry.put(lambda _: trial)
                else:
                    logger.warning("%d batches at a time: %s", offload.launch, why)
        if trial is None:
            return ""
        offload.launch = offload.cores_shared_by = trial.batches
        return trial.what

    def _by_torch(self, reason: str) -> Prepare:
        """Load the model with torch. Raises ``ModelLoadError`` if the settings demand OpenVINO."""
        require(self._dtype != "int8", f"--dtype int8: {reason}.")
        require(self.config.backend != "openvino", f"--backend openvino: {reason}.")
        return self.load_by_torch(self.folder, self.config, self.offload, reason)

    def _why_torch(self, model: ConvertedModel) -> str:
        if model.is_faster() or not self._can_choose:
            return ""
        where = "" if model.processor == cpu_name() else f", on {model.processor}"
        in_float32 = f" in float32; {model.why_float32}" if model.why_float32 else ""
        if model.time_ratio is None:
            return f"OpenVINO's speed was not measured{in_float32}"
        return f"OpenVINO takes {model.time_ratio:.2f} times as long{where}{in_float32}"

    @property
    def _can_choose(self) -> bool:
        """Whether torch may compute the model as well."""
        return self.config.backend == "auto" and not why_not_torch(self.folder.transformer_path)

    def _facts(self, model: ConvertedModel, batches: str) -> dict[str, Any]:
        """Return the facts of its runner that the conversion does not have."""
        dtype = self._dtype if model.is_rounded else "float32"
        computed_in = f"{dtype} weights in float32" if model.why_float32 and model.is_rounded else dtype
        fingerprint = fingerprint_of_loaded(
            *(self.folder.path, self.config, self.parts, computed_in, "openvino"), as_read=self.folder.file_states
        )
        return {
            "computed_by": ComputedBy(fingerprint, dtype, "openvino"),
            "requested_dtype": self.config.dtype,
            "model_type": self.folder.model_type,
            "max_tokens": self.folder.max_model_len,
            "computation": (_about(model), *filter(None, [batches])),
        }


def _about(model: ConvertedModel) -> str:
    by = f"by OpenVINO {model.origin}" if model.origin.startswith("from") else "by OpenVINO"
    if model.mean_cosine is not None:
        return f"{by} in int8 (cosine with float32: mean {model.mean_cosine:.4f}, lowest {model.lowest_cosine:.4f})"
    times = "" if model.time_ratio is None else f"{1 / model.time_ratio:.1f} times as fast as torch"
    in_float32 = f"computed in float32, as {model.why_float32}" if model.why_float32 and model.is_rounded else ""
    notes = "; ".join(filter(None, (times, in_float32, "" if model.masks_padding else ONE_LENGTH)))
    return f"{by} ({notes})" if notes else by
