"""Whether a model is computed by OpenVINO, and its preparation."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.compute_params import ComputeParams
from trio_pool_serve.runner.device import has_native_bfloat16, saturates_int8
from trio_pool_serve.runner.forward_pass import PaddedCompute
from trio_pool_serve.runner.loaded_model import LoadedModel
from trio_pool_serve.runner.openvino.agreement import Agreement, agreement, all_batches, short_batches
from trio_pool_serve.runner.openvino.model_cache import (
    MODEL,
    CacheEntry,
    Record,
    cache_entry,
    checksums,
    default_cache_dir,
    saved,
)
from trio_pool_serve.runner.openvino.trial import MAX_RATIO, machine_name, time_ratio

if TYPE_CHECKING:  # optional dependencies, which are imported once they are known to be installed
    import openvino as ov

    from trio_pool_serve.runner.openvino.openvino_backbone import OpenVinoBackbone

logger = logging.getLogger(__name__)

MIN_COSINE = {torch.float32: 0.99999, torch.bfloat16: 0.999}
"""Smallest cosine of a row's output with that of the backbone in float32."""

GOOD_INT8_COSINE = 0.99
"""Below it, on a CPU whose sums overflow, weights are tried in half of the range. Of a BERT of random weights the mean
rose from 0.988 to 0.999; of MiniLM, which has 0.993, it would have fallen to 0.992 (AVX2, no VNNI)."""

MIN_INT8_COSINE = 0.98
"""Smallest mean cosine of the rows' outputs of a quantised model with those in float32."""

CACHED_SLACK = {torch.float32: 1e-5, torch.bfloat16: 0.005}
"""By how much a cached model's lowest cosine may be below that of its first start."""

INT8_CACHED_SLACK = 0.02

HELD_OUT_ROWS = 8
"""Rows of a batch on which a quantised model is compared."""


class CannotUseOpenVinoError(Exception):
    """The model is not computed by OpenVINO; the message says why."""


def require_openvino(backbone: Backbone, config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ``CannotUseOpenVinoError`` if the model cannot be computed by OpenVINO in any case."""
    if config.backend == "torch":
        raise CannotUseOpenVinoError("as configured")
    if find_spec("openvino") is None:
        raise CannotUseOpenVinoError("OpenVINO is not installed")
    if config.dtype == "int8" and find_spec("nncf") is None:
        raise CannotUseOpenVinoError("NNCF is not installed: pip install trio-pool-serve[int8]")
    if type(backbone) is not Backbone:
        raise CannotUseOpenVinoError("OpenVINO is not used for models that read images")
    if dtype not in MIN_COSINE:
        raise CannotUseOpenVinoError(f"OpenVINO is not used for {str(dtype).removeprefix('torch.')}")
    if dtype == torch.bfloat16 and not has_native_bfloat16(torch.device("cpu")):
        # It computes it all the same, 14 times slower than torch (MiniLM, AVX512 without BF16).
        raise CannotUseOpenVinoError("OpenVINO is used for bfloat16 only where the CPU computes it natively")


def choose_openvino(
    loaded: LoadedModel, config: ModelConfig, params: ComputeParams
) -> tuple[PaddedCompute, str, float | None]:
    """Return the computation by OpenVINO, words for the log, and the mean cosine with float32 of a quantised model.

    With ``--backend auto`` it must be faster than torch, but not in int8, which is chosen by the user; if that
    cannot be timed now and has not been before, it counts as faster. From the cache later starts choose the same.
    Blocks for seconds; for up to minutes if a model is quantised. Raises ``CannotUseOpenVinoError``.
    """
    require_openvino(loaded.backbone, config, params.dtype)
    preparation = Preparation(loaded, config, params)
    with nullcontext() if preparation.entry is None else preparation.entry.locked():
        return preparation.prepare()


@define(eq=False)
class Preparation:
    """The conversion of one model, its comparison with torch, and both from the cache."""

    loaded: LoadedModel
    config: ModelConfig
    params: ComputeParams
    entry: CacheEntry | None = field(init=False)

    @entry.default
    def _find_entry(self) -> CacheEntry | None:
        chosen = self.config.cache_dir
        cache_dir = default_cache_dir() if chosen is None else Path(chosen).expanduser() if chosen else None
        if cache_dir is None or self.params.folder is None:
            return None
        backbone = self.loaded.backbone
        kind = (type(backbone.model).__qualname__, backbone.output, "int8" if self._is_int8 else str(self.params.dtype))
        try:
            return cache_entry(cache_dir, self.params.folder, *kind)
        except OSError as error:
            logger.warning("the converted model is not cached: %s", error)
            return None

    @property
    def _is_int8(self) -> bool:
        return self.config.dtype == "int8"

    def prepare(self) -> tuple[PaddedCompute, str, float | None]:
        """Return what ``choose_openvino`` does; the entry is locked meanwhile."""
        record = None if self.entry is None else self.entry.read()
        ratios = {} if record is None else dict(record.time_ratios)
        self._require_faster(ratios)
        compute = None if record is None else self._read_cached(record)
        if record is None or compute is None:
            compute, record = self._convert()
        if self._is_tried and self._machine not in ratios:
            ratios[self._machine] = self._try_speed(compute) if self.params.may_time else None
        if self.entry is not None and ratios != record.time_ratios:
            self.entry.update(evolve(record, time_ratios=ratios))
        self._require_faster(ratios)
        return compute, self._describe(record, ratios.get(self._machine)), record.mean_cosine

    # -- speed ------------------------------------------------------------------------------------------

    @property
    def _is_tried(self) -> bool:
        return self.config.backend == "auto" and not self._is_int8

    @property
    def _machine(self) -> str:
        return machine_name(torch.get_num_threads())

    def _try_speed(self, compute: PaddedCompute) -> float:
        backbone = self.loaded.backbone
        return time_ratio(
            compute,
            backbone,
            vocab_size=backbone.vocab_size,
            max_tokens=self.params.max_tokens,
            pad_token_id=self.params.pad_token_id,
        )

    def _require_faster(self, ratios: Mapping[str, float | None]) -> None:
        ratio = ratios.get(self._machine)
        if self._is_tried and ratio is not None and not ratio <= MAX_RATIO:
            raise CannotUseOpenVinoError(f"OpenVINO takes {ratio:.2f} times as long")

    def _describe(self, record: Record, ratio: float | None) -> str:
        if self._is_int8:
            return (
                f"by OpenVINO in int8 (cosine with float32: mean {record.mean_cosine:.4f}, "
                f"lowest {record.lowest_cosine:.4f})"
            )
        if ratio is not None:
            return f"by OpenVINO (in {ratio:.2f} times torch's time)"
        return "by OpenVINO (not timed beside other requests)" if self._is_tried else "by OpenVINO"

    # -- conversion -------------------------------------------------------------------------------------

    def _read_cached(self, record: Record) -> "OpenVinoBackbone | None":
        """Return the cached model, compiled; ``None`` if it is damaged or gives another output than it did."""
        assert self.entry is not None  # noqa: S101
        try:
            if checksums(self.entry.path) != record.checksums:
                raise ValueError("its files have been changed")  # noqa: TRY301
            compute = self._compile(self.entry.path)
            cosine = self._short_cosine(compute)
        except Exception as error:
            problem = _first_line(error)
        else:
            slack = INT8_CACHED_SLACK if self._is_int8 else CACHED_SLACK[self.params.dtype]
            if cosine >= record.short_cosine - slack:
                return compute
            problem = f"its output differs: cosine {cosine:.5f}"
        logger.warning("the model in %s is converted anew: %s", self.entry.path, problem)
        return None

    def _convert(self) -> "tuple[OpenVinoBackbone, Record]":
        """Convert, compile, compare and cache the model. Raises ``CannotUseOpenVinoError``."""
        # Imported here: an optional dependency.
        from trio_pool_serve.runner.openvino.conversion import convert, in_float32

        logger.info("converting the model for OpenVINO%s", ", in int8: this takes a while" if self._is_int8 else "")
        try:
            with in_float32(self.loaded.backbone) as exact, ExitStack() as folders:
                model = convert(exact)
                return (self._quantize if self._is_int8 else self._compare)(model, exact, folders)
        except CannotUseOpenVinoError:
            raise
        except Exception as error:
            raise CannotUseOpenVinoError(f"OpenVINO fails: {_first_line(error)}") from error

    def _compare(self, model: "ov.Model", exact: Backbone, folders: ExitStack) -> "tuple[OpenVinoBackbone, Record]":
        folder = self._save(model, folders)
        compute = self._compile(folder)
        batches = all_batches(exact, self.params.max_tokens)
        cosine = agreement(compute, exact, batches, pad_token_id=self.params.pad_token_id).lowest
        if not cosine >= MIN_COSINE[self.params.dtype]:
            raise CannotUseOpenVinoError(f"OpenVINO's output differs: cosine {cosine:.5f}")
        return compute, self._cache(folder, Record(self._short_cosine(compute)))

    def _quantize(self, model: "ov.Model", exact: Backbone, folders: ExitStack) -> "tuple[OpenVinoBackbone, Record]":
        from trio_pool_serve.runner.openvino.quantization import quantize

        samples = self.params.sample_prompts()
        held_out = [samples.held_out[at : at + HELD_OUT_ROWS] for at in range(0, len(samples.held_out), HELD_OUT_ROWS)]

        def attempt(*, halves_range: bool) -> "tuple[Agreement, Path, OpenVinoBackbone]":
            folder = self._save(quantize(model, samples.calibration, halves_range=halves_range), folders)
            compute = self._compile(folder)
            pad_token_id, heads = self.params.pad_token_id, self.loaded.heads
            return agreement(compute, exact, held_out, pad_token_id=pad_token_id, heads=heads), folder, compute

        found, folder, compute = attempt(halves_range=False)
        if found.mean < GOOD_INT8_COSINE and saturates_int8():
            other = attempt(halves_range=True)
            if other[0].mean > found.mean:
                found, folder, compute = other
        if not found.mean >= MIN_INT8_COSINE:
            raise CannotUseOpenVinoError(
                f"in int8 the model's output differs too much from float32: cosine {found.mean:.4f} on average, "
                f"where {MIN_INT8_COSINE} is the least"
            )
        return compute, self._cache(folder, Record(self._short_cosine(compute), found.mean, found.lowest))

    def _save(self, model: "ov.Model", folders: ExitStack) -> Path:
        """Return the folder that the model was saved to, which ``folders`` will remove. Raises what saving raises."""
        import openvino as ov

        return Path(folders.enter_context(saved(partial(ov.save_model, model, compress_to_fp16=False), self.entry)))

    def _compile(self, folder: Path) -> "OpenVinoBackbone":
        """Return the model that was saved in a folder, compiled.

        One that was just converted would give other numbers than each later start, Gemma 3 in bfloat16 by 0.03: its
        nodes have marks that are not saved, and because of which some of them are neither folded nor fused.
        """
        import openvino as ov

        from trio_pool_serve.runner.openvino.openvino_backbone import PRECISIONS, CompileParams, compile_model

        compile_params = CompileParams(
            PRECISIONS[self.params.dtype],
            cores=torch.get_num_threads(),
            streams=self.params.concurrent_launches,
            sharers=self.params.cores_shared_by,
            idle_streams=self.params.background_launches,
        )
        return compile_model(self.loaded.backbone, ov.Core().read_model(folder / MODEL), compile_params)

    def _short_cosine(self, compute: PaddedCompute) -> float:
        """Return the lowest cosine with the backbone as it was loaded."""
        backbone = self.loaded.backbone
        batches = short_batches(backbone, self.params.max_tokens)
        return agreement(compute, backbone, batches, pad_token_id=self.params.pad_token_id).lowest

    def _cache(self, folder: Path, record: Record) -> Record:
        record = evolve(record, checksums=checksums(folder))
        if self.entry is not None:
            self.entry.publish(folder, record)
        return record


def _first_line(error: Exception) -> str:
    return repr(error).splitlines()[0][:200]
