"""What is recorded of a converted model: all that a start needs besides the graph itself."""

import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trio_pool_serve.runner.openvino.heads import AnyHead
from trio_pool_serve.runner.shared_cores import usable_cores
from trio_pool_serve.types import (
    Classify,
    Embed,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

GRAPH, MODULES, TABLE = "model.xml", "modules.xml", "table.npy"
"""Files of a conversion: the graph, the graph of the modules behind pooling, and the weights of ``SparseLookup``."""

LONGEST_COMPARED = 1024
"""Tokens of the longest row that is compared with torch."""

LIBRARIES = ("openvino", "nncf", "torch", "transformers")
"""The libraries on whose versions a conversion depends."""

MAX_RATIO = 0.9
"""OpenVINO is the faster one if it takes at most this part of torch's time. Repeated trials of one model on an idle
machine differ by less than 5 %."""


RETRY_S = 7 * 24 * 60 * 60
"""How long it is kept that torch was faster: other programs may have slowed OpenVINO down meanwhile."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model from loading it by torch, as ``TransformerRunner`` has it."""

    parameters: int
    weight_bytes: int
    multiplications: int
    """For each token, by the backbone."""
    heads: str
    dimensions: int
    embeds_width: int | None
    """``None`` if torch did not load the model."""
    pad_token_id: int
    default_batch_tokens: int


class Check(msgspec.Struct, frozen=True):
    """A short row and what was computed for it: ``param`` names the params, the values are in one list.

    ``indices`` are the vocabulary indices of the values, if these are a sparse vector.
    """

    param: str
    token_ids: list[int]
    values: list[float]
    indices: list[int] = []

    @classmethod
    def of(cls, request: PoolingRequest, value: PooledValue) -> "Check":
        """Return the check of a row with one of ``CHECKED`` and its value."""
        name, ids = type(request.params[0]).__name__, request.prompt.token_ids.tolist()
        if isinstance(value, SparseVector):
            return cls(name, ids, value.values.tolist(), value.indices.tolist())
        return cls(name, ids, value.ravel().tolist())

    @property
    def request(self) -> PoolingRequest:
        """The row."""
        return PoolingRequest(RenderedPrompt(np.array(self.token_ids, dtype=np.int32)), (CHECKED[self.param],))

    def numbers(self) -> npt.NDArray[np.float32]:
        """Return the values; of a sparse vector with the zeros between them."""
        values = np.array(self.values, dtype=np.float32)
        if not self.indices:
            return values
        numbers = np.zeros(max(self.indices) + 1, dtype=np.float32)
        numbers[self.indices] = values
        return numbers


CHECKED: Mapping[str, PoolingParams] = {
    type(params).__name__: params
    for params in (Embed(), TokenEmbed(), SparseEmbed(), Classify("raw"), TokenClassify("raw"))
}
"""The params of checks, by name. Activations would hide differences: of 8 and 12 the sigmoid is nearly the same."""


class ConvertedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model's conversion, or why there is none.

    ``mean_cosine`` and ``lowest_cosine`` say how a quantised model agrees with float32, on texts. ``time_ratios`` has
    OpenVINO's time as a part of torch's for each machine, by ``machine_name``. ``versions`` has the libraries that
    converted it.
    """

    what: str = ""
    """What it is, for people."""
    refused: str = ""
    """Why the model is not computed by OpenVINO; then there are no files."""
    versions: dict[str, str]
    origin: str = ""
    """Of a model with an exported file: that it was taken, or why not."""
    time_ratios: dict[str, float] = {}
    mean_cosine: float | None = None
    lowest_cosine: float | None = None
    description: Description | None = None
    heads: dict[str, AnyHead] = {}
    """By the name of the params that they serve."""
    check: Check | None = None
    made_at: float = msgspec.field(default_factory=time.time)
    """Seconds since the epoch."""

    def is_current(self) -> bool:
        """Whether it was made with the libraries of this process, as far as these are installed."""
        installed = versions()
        return all(installed[name] in ("none", made_with) for name, made_with in self.versions.items())

    @property
    def is_old(self) -> bool:
        """Whether it is time to try again if OpenVINO is slower than torch."""
        return not self.is_faster() and time.time() > self.made_at + RETRY_S

    @property
    def ratio(self) -> float | None:
        """OpenVINO's time as a part of torch's: on this machine, or else on another; ``None`` if it was not timed."""
        return self.time_ratios.get(machine_name(), min(self.time_ratios.values(), default=None))

    def is_faster(self) -> bool:
        """Whether OpenVINO computes it faster than torch, as far as is known."""
        return self.ratio is None or self.ratio <= MAX_RATIO


def versions() -> dict[str, str]:
    """Return the versions of ``LIBRARIES``; "none" for a library that is not installed."""
    return {library: _version(library) for library in LIBRARIES}


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def machine_name() -> str:
    """Return what a trial's result depends on: the CPU's model name and the number of threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown CPU')}, {usable_cores()} threads"
