"""The report of ``trio-pool-serve check``."""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from attrs import frozen
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from trio_pool_serve.config import Config, ModelConfig, Placement
from trio_pool_serve.models.files.adapter_files import read_adapter_config
from trio_pool_serve.models.files.joined_folder import adapter_in
from trio_pool_serve.models.model_kind import AnyModelFolder, Scoring, Similarity
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PoolingTask

Accepted: TypeAlias = Literal["text", "image", "messages", "prompt_embeds"]

OF_THE_KIND = "the kind of model"
"""Source of a pooling that no file chooses."""

ASSUMED = "assumed, as no file declares it"


@frozen(kw_only=True)
class Memory:
    """Memory in bytes. Resident memory includes libraries; a server has as much in each engine process."""

    weights: int
    """Parameters of the backbone. With OpenVINO, there is a second copy while both are loaded."""
    resident_before: int
    resident_after_load: int
    peak_of_largest_batch: int | None = None
    """``None`` if not measured."""


@frozen(kw_only=True)
class Speed:
    """How fast rows of one length are computed, without HTTP and tokenising."""

    tokens: int
    """Length of each row."""
    rows_per_s: float
    """Rows per second, with the number of concurrent batches that a server would compute."""
    tokens_per_s: float
    ms_alone: float
    """Median time from the submission of a row to its output, with no other rows, in milliseconds."""


@frozen(kw_only=True)
class ModelReport:
    """How a model would be served. Fields are named as in `/v1/models` and `/info`."""

    servable: Literal[True] = True
    id: str
    kind: str
    architectures: tuple[str, ...]
    model_type: str
    weights: str
    """Adapters and the quantised format; empty for one plain checkpoint."""
    parameters: int
    task: str
    tasks: list[PoolingTask]
    accepts: list[Accepted]
    scoring: Scoring | None
    similarity: Similarity | None
    modules: list[str]
    """sentence-transformers modules after the transformer."""
    pooling: str
    pooling_from: str
    normalize: bool
    normalize_from: str
    dimensions: int
    labels: list[str]
    particulars: Mapping[str, str]
    """How inputs are rendered and outputs computed, where models of the kind differ."""
    max_model_len: int
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    dtype: str
    device: str
    backend: str
    computation: str
    """How batches are computed, and why."""
    fingerprint: str
    cosine_with_float32: float | None
    engine: Placement | None
    """Process or host where the server would compute with these settings."""
    replicas: int
    max_batch_tokens: int
    load_s: float
    memory: Memory
    speed: list[Speed]
    warnings: list[str]
    mps: str = ""
    """Whether engine processes on the same GPU would compute at the same time; empty without GPUs."""
    command: str = ""
    """Serves the model with the same settings."""


@frozen(kw_only=True)
class Refusal:
    """A model that cannot be served."""

    servable: Literal[False] = False
    error: str


def kind_of(folder: AnyModelFolder) -> str:
    """Return the kind of a model, such as ``late_interaction``, from the class name of its spec."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(folder.spec).__name__).lower()


def accepted_by(model: Model, config: Config) -> list[Accepted]:
    """Return the kinds of input that requests may have."""
    conversations = model.renderer.conversations
    has_template = conversations is not None and bool(conversations.chat.templates)
    offered: Mapping[Accepted, bool] = {
        "text": True,
        "image": model.folder.reads_images,
        "messages": model.folder.spec.supports_messages and has_template,
        "prompt_embeds": config.input.enable_prompt_embeds and not isinstance(model.renderer.embeds_format, str),
    }
    return [kind for kind, is_accepted in offered.items() if is_accepted]


def pooling_from(folder: AnyModelFolder, loading: ModelConfig) -> str:
    """Return the source of the pooling: a file of the folder, or a setting."""
    if loading.pooling is not None:
        return "--pooling"
    root = folder.path.resolve()
    for module in folder.spec.modules:
        if module.name == "Pooling" and module.path.resolve() != root:
            return str(module.path.resolve().relative_to(root) / "config.json")
    return ASSUMED if folder.spec.assumption else OF_THE_KIND


def weights_of(folder: AnyModelFolder, loading: ModelConfig) -> str:
    """Return the parts of a model's weights, such as ``LoRA adapter on org/base``; empty for one checkpoint."""
    made_of = []
    if (adapter := adapter_in(folder.path)) is not None:
        base = loading.adapter_base or read_adapter_config(adapter).get("base_model_name_or_path")
        made_of.append(f"LoRA adapter on {base}")
    if folder.task_adapters:
        made_of.append(f"its checkpoint, and LoRA adapters for {', '.join(folder.task_adapters)}")
    if folder.quantization is not None:
        made_of.append(f"dequantised from {folder.quantization.name}")
    return ", ".join(made_of)


def normalize_from(folder: AnyModelFolder, loading: ModelConfig) -> str:
    """Return the file of the folder, or the setting, that decides whether vectors are normalised."""
    if loading.normalize is not None:
        return "--normalize" if loading.normalize else "--no-normalize"
    if (folder.path / "modules.json").is_file():
        return "modules.json"
    return ASSUMED if folder.spec.assumption else OF_THE_KIND


def particulars_of(folder: AnyModelFolder) -> Mapping[str, str]:
    """Return how inputs are rendered; for models that score pairs, the activation of a score."""
    activation = getattr(folder.spec, "score_activation", "") if folder.spec.scoring == "pairs" else ""
    return {"activation": activation.rpartition(".")[2]} if activation else folder.spec.particulars


MIB = 2**20

SHOWN_LABELS = 10


def print_report(report: ModelReport, console: Console) -> None:
    """Print the report of a model that can be served; the first line is the verdict."""
    computed = f"{report.dtype} on {report.device}, {report.computation}"
    console.print(Text(f"{report.id} works: {report.kind.replace('_', ' ')}, {computed}.", "green"), soft_wrap=True)
    if report.command:
        console.print(Text(f"Serve it: {report.command}", style="bold"), soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    for name, value in _facts(report):
        if value:
            facts.add_row(name, Text(value))  # Text, because values from files may look like markup
    console.print(facts)
    if report.speed:
        console.print(_speed_table(report))
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"))


def _facts(report: ModelReport) -> list[tuple[str, str]]:
    """Return the facts by name; a fact without a text does not apply to the model, or was not measured."""
    memory, peak = report.memory, report.memory.peak_of_largest_batch
    more_labels = len(report.labels) - SHOWN_LABELS
    cosine = report.cosine_with_float32
    normalized = f"{'yes' if report.normalize else 'no'} ({report.normalize_from})"
    return [
        (
            "memory",
            f"{memory.resident_after_load / MIB:.0f} MiB once loaded ({memory.resident_before / MIB:.0f} before)"
            + ("" if peak is None else f", {peak / MIB:.0f} MiB with the largest batches"),
        ),
        ("weights", f"{memory.weights / MIB:.0f} MiB, {report.parameters / 1e6:.1f} M parameters"),
        ("kind", f"{report.kind}: {', '.join(report.architectures) or report.model_type}"),
        ("made of", report.weights),
        ("tasks", ", ".join(f"{task} (default)" if task == report.task else task for task in report.tasks)),
        ("accepts", ", ".join(report.accepts)),
        ("scoring", ", ".join(filter(None, (report.scoring, report.similarity)))),
        ("pooling", "" if report.pooling == "none" else f"{report.pooling} ({report.pooling_from})"),
        ("normalised", normalized if report.dimensions else ""),
        ("dimensions", str(report.dimensions or "")),
        ("labels", ", ".join(report.labels[:SHOWN_LABELS]) + (f" and {more_labels} more" if more_labels > 0 else "")),
        *report.particulars.items(),
        ("longest input", f"{report.max_model_len} tokens"),
        *_prompts(report),
        ("fingerprint", report.fingerprint),
        ("agreement", "" if cosine is None else f"cosine with float32: {cosine:.4f}"),
        ("engine", f"{report.engine}, {report.replicas} at a time, batches of {report.max_batch_tokens} tokens"),
        ("MPS", report.mps),
        ("loaded in", f"{report.load_s:.1f} s"),
    ]


def _prompts(report: ModelReport) -> list[tuple[str, str]]:
    if report.scoring == "vectors" and not report.prompts:
        return [("prompts", "none in the files; the model's card may name some")]
    return [
        ("prompt", f"{name}{' (default)' if name == report.default_prompt_name else ''}: {prompt!r}")
        for name, prompt in report.prompts.items()
    ]


def _speed_table(report: ModelReport) -> Table:
    names = ("tokens per row", "rows/s", "tokens/s", "ms for one row alone")
    table = Table(*[Column(name, justify="right") for name in names])
    for speed in report.speed:
        table.add_row(
            str(speed.tokens), f"{speed.rows_per_s:.1f}", f"{speed.tokens_per_s:.0f}", f"{speed.ms_alone:.1f}"
        )
    return table
