"""What ``trio-pool-serve check`` says about a model."""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.checking.measuring import Speed
from trio_pool_serve.config import Config, ModelConfig, Placement
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.models.model_spec import Scoring, Similarity
from trio_pool_serve.runner.runner_description import Backend
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PoolingTask

Accepted: TypeAlias = Literal["text", "image", "messages", "prompt_embeds"]

OF_THE_KIND = "the kind of model"
"""Where pooling was read that no file chooses."""

ASSUMED = "assumed, as no file declares it"


@frozen(kw_only=True)
class Memory:
    """Bytes. Resident is what the process has, its libraries included; a server has that in each engine process."""

    weights: int
    """Parameters of the backbone. OpenVINO has a copy of its own while both are loaded."""
    resident_before: int
    resident_after_load: int
    peak_of_largest_batch: int | None = None
    """Not measured: ``None``."""


@frozen(kw_only=True)
class ModelReport:
    """How one model would be served. Names of fields are those of `/v1/models` and `/info` where these have them."""

    servable: Literal[True] = True
    id: str
    kind: str
    architectures: tuple[str, ...]
    model_type: str
    parameters: int
    task: str
    tasks: list[PoolingTask]
    accepts: list[Accepted]
    scoring: Scoring | None
    similarity: Similarity | None
    modules: list[str]
    """Those of sentence-transformers after the transformer."""
    pooling: str
    pooling_from: str
    normalize: bool
    normalize_from: str
    dimensions: int
    labels: list[str]
    max_model_len: int
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    dtype: str
    device: str
    backend: Backend
    computation: str
    """How batches are computed, and why so."""
    cosine_with_float32: float | None
    engine: Placement | None
    """Where the server would compute by these settings."""
    replicas: int
    max_batch_tokens: int
    load_s: float
    memory: Memory
    speed: list[Speed]
    warnings: list[str]


@frozen(kw_only=True)
class Refusal:
    """A model that cannot be served."""

    servable: Literal[False] = False
    error: str


def kind_of(folder: AnyModelFolder) -> str:
    """Return the name of a folder's kind of model: that of its spec's class, such as ``late_interaction``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(folder.spec).__name__).lower()


def accepted_by(model: Model, config: Config) -> list[Accepted]:
    """Return what a request may have as an input."""
    folder, spec = model.folder, model.folder.spec
    accepted: list[Accepted] = ["text"]
    if folder.reads_images:
        accepted.append("image")
    conversations = model.renderer.conversations
    if spec.supports_messages and conversations is not None and conversations.chat.templates:
        accepted.append("messages")
    if config.input.enable_prompt_embeds and not isinstance(model.renderer.embeds_format, str):
        accepted.append("prompt_embeds")
    return accepted


def pooling_from(folder: AnyModelFolder, loading: ModelConfig) -> str:
    """Return where the pooling was read: a file of the folder, or a setting."""
    if loading.pooling is not None:
        return "--pooling"
    root = folder.path.resolve()
    for module in folder.spec.modules:
        if module.name == "Pooling" and module.path.resolve() != root:
            return str(module.path.resolve().relative_to(root) / "config.json")
    return ASSUMED if folder.spec.assumption else OF_THE_KIND


def normalize_from(folder: AnyModelFolder, loading: ModelConfig) -> str:
    """Return where it was read whether vectors are normalised: a file of the folder, or a setting."""
    if loading.normalize is not None:
        return "--normalize" if loading.normalize else "--no-normalize"
    if (folder.path / "modules.json").is_file():
        return "modules.json"
    return ASSUMED if folder.spec.assumption else OF_THE_KIND
