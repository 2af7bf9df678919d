"""The record of a converted model: all that a start needs besides the graph itself."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.cpu_features import cpu_name
from trio_pool_serve.runner.openvino.heads import AnyHead
from trio_pool_serve.storage.model_cache import installed_versions
from trio_pool_serve.types import (
    Classify,
    Embed,
    PooledValue,
    PoolingParams,
    RenderedPrompt,
    SparseEmbed,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

GRAPH, MODULES, TABLE = "model.xml", "modules.xml", "table.npy"
"""Files of a conversion: the graph, the graph of the modules after pooling, and the weights of ``SparseLookup``."""

LONGEST_COMPARED = 1024
"""Tokens of the longest row that is compared with torch."""

LIBRARIES = ("openvino", "nncf", "torch", "transformers")
"""The libraries on whose versions a conversion depends."""

MAX_RATIO = 0.9
"""OpenVINO counts as faster if it takes at most this part of torch's time. Repeated trials of one model on an idle
machine differ by less than 5 %."""

RETRY_S = 7 * 24 * 60 * 60
"""Seconds after which a model that torch computed faster is tried again: other programs may have slowed OpenVINO."""

COMPARED: Sequence[PoolingParams] = (
    Embed(normalize=False),
    TokenEmbed(normalize=False),
    SparseEmbed(max_active_dims=2**31 - 1),
    Classify("raw"),
    TokenClassify("raw"),
)
"""The params whose values are compared, of a model that has their heads. Activations would hide differences: of 8 and
12 the sigmoid is nearly the same. Of two weights that are nearly equal, either may be among the greatest: all are
compared."""


class UnusableGraphError(ModelLoadError):
    """A graph cannot be made or computed, or its output is not the model's; the message gives the reason."""


class Check(msgspec.Struct, frozen=True):
    """A short row and its value for the first of the params that are compared.

    ``indices`` are the vocabulary indices of the values, if these are a sparse vector.
    """

    token_ids: list[int]
    values: list[float]
    indices: list[int] | None = None

    @classmethod
    def of(cls, prompt: RenderedPrompt, value: PooledValue) -> "Check":
        """Return the check of a row and its value."""
        if isinstance(value, SparseVector):
            return cls(prompt.token_ids.tolist(), value.values.tolist(), value.indices.tolist())
        return cls(prompt.token_ids.tolist(), value.ravel().tolist())

    @property
    def prompt(self) -> RenderedPrompt:
        """The row."""
        return RenderedPrompt(np.array(self.token_ids, np.int32))

    @property
    def value(self) -> PooledValue:
        """The value, in one dimension."""
        values = np.array(self.values, np.float32)
        return values if self.indices is None else SparseVector(np.array(self.indices, np.int32), values)


class ConvertedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model's conversion, or why there is none: then the numbers mean nothing.

    ``mean_cosine`` and ``lowest_cosine`` compare a quantised model with float32, on texts. ``time_ratio`` is
    OpenVINO's time as a part of torch's, if that was tried. ``versions`` has the libraries that converted it.
    """

    what: str = ""
    """A description for people."""
    refused: str = ""
    """Why the model is not computed by OpenVINO; then there are no files."""
    versions: dict[str, str] = msgspec.field(default_factory=lambda: installed_versions(*LIBRARIES))
    made_at: float = msgspec.field(default_factory=time.time)
    """Seconds since the epoch."""
    processor: str = msgspec.field(default_factory=cpu_name)
    """The CPU that it was compared and timed on."""
    origin: str = ""
    """How the exported file was used, or the reason why it was not; empty for a model without one."""
    why_float32: str = ""
    """Why float32 computes it where bfloat16 was chosen; empty if it does not."""
    is_rounded: bool = True
    """Whether its weights were rounded to the dtype that was chosen."""
    time_ratio: float | None = None
    mean_cosine: float | None = None
    lowest_cosine: float | None = None
    check: Check | None = None
    heads: dict[str, AnyHead] = {}
    """The heads by the name of their params."""
    about_heads: str = ""
    modules: dict[str, int] = {}
    """Nodes of the graph that compute each linear layer and embedding of the backbone, which adapters may update.

    0: the output does not depend on it. -1: not all of its uses are in the graph, or its weight is another there.
    Empty for an exported file that torch has not loaded.
    """
    parameters: int = 0
    weight_bytes: int = 0
    dimensions: int = 0
    embeds_width: int | None = None
    """``None`` if torch did not load the model."""
    pad_token_id: int = 0
    masks_padding: bool = True
    """Otherwise only rows of one length are computed together."""
    default_batch_tokens: int = 0

    @property
    def compared(self) -> list[PoolingParams]:
        """The params in ``COMPARED`` for which it has a head."""
        return [params for params in COMPARED if type(params).__name__ in self.heads]

    def dtype_of(self, wanted: str) -> str:
        """Return the data type in which OpenVINO computes it, where the settings choose ``wanted``."""
        return "float32" if self.why_float32 else wanted

    def is_current(self) -> bool:
        """Whether it was made with the libraries of this process, as far as these are installed."""
        installed = installed_versions(*LIBRARIES)
        return all(installed.get(name, made_with) == made_with for name, made_with in self.versions.items())

    def is_faster(self) -> bool:
        """Whether OpenVINO computes it faster than torch, as far as is known: in float32 only if that was tried."""
        return not self.why_float32 if self.time_ratio is None else self.time_ratio <= MAX_RATIO

    def is_old(self) -> bool:
        """Whether it is time to try, or to try again if OpenVINO is slower than torch."""
        return not self.is_faster() and (self.time_ratio is None or time.time() > self.made_at + RETRY_S)


Numbers = npt.NDArray[np.float64]


def as_vectors(ours: PooledValue, expected: PooledValue) -> tuple[Numbers, Numbers]:
    """Return the numbers of two values of the same params; of sparse vectors with the zeros between them."""
    if isinstance(ours, SparseVector) and isinstance(expected, SparseVector):
        size = max(ours.indices.max(initial=0), expected.indices.max(initial=0)) + 1
        dense = np.zeros((2, size))
        dense[0, ours.indices], dense[1, expected.indices] = ours.values, expected.values
        return dense[0], dense[1]
    return np.asarray(ours, np.float64).ravel(), np.asarray(expected, np.float64).ravel()


def is_near(ours: PooledValue, expected: PooledValue, slack: float) -> bool:
    """Whether no number differs from the expected one by more than ``slack``, as a part of the largest expected."""
    a, b = as_vectors(ours, expected)
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0) <= slack * np.abs(b).max(initial=0))
