"""LoRA adapters in the memory of a runner: read when a row first names them, and dropped when others need the room."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.errors import AdapterError, ModelLoadError, require
from trio_pool_serve.runner.device_memory import is_out_of_memory
from trio_pool_serve.types import Adapter

MAX_LOADED = 64
"""Maximum adapters in a runner's memory; the least recently used one leaves first, and is read again when needed."""

MAX_BYTES = 2**30
"""Maximum bytes of all loaded adapters, unless a single one is larger."""

RETRY_S, READING_SHARE = 5.0, 0.05
"""Minimum seconds until an adapter that could not be applied is read again, and maximum share of the time that is spent
reading it in vain: other rows wait meanwhile."""

Array: TypeAlias = npt.NDArray[np.float32]


class Update(Protocol):
    """The change of one module's weights: see ``models.files.adapter_files.LowRankUpdate``."""

    @property
    def down(self) -> Array:
        """Shape [r, in]; for an embedding, [r, ids]."""

    @property
    def up(self) -> Array:
        """Shape [out, r]; for an embedding, [dim, r]."""

    @property
    def scale(self) -> float:
        """Factor of the product of ``up`` and ``down``."""

    @property
    def is_embedding(self) -> bool:
        """Whether the module is an embedding."""


class AdapterWeights(Protocol):
    """An adapter as read from its files, by names of modules and of weights."""

    @property
    def updates(self) -> Mapping[str, Update]:
        """Low-rank updates by module."""

    @property
    def weights(self) -> Mapping[str, Array]:
        """Whole weights by name."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names, or their ends after a dot, of all modules that it updates; empty if its config restricts them."""

    @property
    def digest(self) -> str:
        """The digest of the adapter's files."""


class Sized(Protocol):
    """An adapter in the form in which a runner applies it."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the adapter takes."""


IN_A_LAYER = re.compile(r"\.\d+\.")
"""Part of the names of modules in layers. Poolers and heads are left out: a model may have others than its base."""

SHOWN = 5
"""Names in an error."""


def require_all_layers(adapter: AdapterWeights, unchanged: Iterable[str], folder: str) -> None:
    """Raise ``AdapterError`` if an adapter leaves a layer's module unchanged that its config names."""
    ends = tuple(f".{name}" for name in adapter.target_modules)
    missing = sorted(name for name in unchanged if IN_A_LAYER.search(name) and f".{name}".endswith(ends))
    require(
        not missing,
        f"{folder} lacks updates for modules that its target_modules name: {shown(missing)}. If it was trained for "
        "some layers only, its config must name them in layers_to_transform.",
        AdapterError,
    )


def require_shape(update: Update, shape: tuple[int, ...], name: str, folder: str) -> None:
    """Raise ``AdapterError`` unless an update is for a module of this shape."""
    if (wanted := (len(update.up), update.down.shape[1])) != shape:
        raise AdapterError(f"{folder} is for another model: its {name} is {wanted}, the model's {shape}.")


def shown(names: Collection[str]) -> str:
    """Return the first names of weights, and how many there are more."""
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


T = TypeVar("T")
Placed = TypeVar("Placed", bound=Sized)


@define(eq=False)
class RecentlyUsed(Generic[T]):
    """Values by key, each made by the first thread that needs it; threads that need other values do not wait."""

    is_too_much: Callable[[Collection[T]], bool]
    """Whether the least recently used value has to leave; the last one stays."""
    _values: OrderedDict[Hashable, T] = field(init=False, factory=OrderedDict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _making: threading.Lock = field(init=False, factory=threading.Lock)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; ``make`` makes it if it is missing. Raises the errors of ``make``."""
        if (value := self._known(key)) is not None:
            return value
        with self._making:
            if (value := self._known(key)) is None:  # else another thread was faster
                value = make()
                with self._lock:
                    self._values[key] = value
                    while len(self._values) > 1 and self.is_too_much(self._values.values()):
                        self._values.popitem(last=False)
        return value

    def _known(self, key: Hashable) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def values(self) -> list[T]:
        """Return all values, the least recently used one first."""
        with self._lock:
            return [*self._values.values()]


def _is_too_much(adapters: Collection[Sized]) -> bool:
    return len(adapters) > MAX_LOADED or sum(each.nbytes for each in adapters) > MAX_BYTES


@define(eq=False)
class AdapterStore(Generic[Placed]):
    """The adapters of one model, by the digest of their files; used by several threads.

    ``read`` returns an adapter's weights. ``place`` takes the weights and the folder, and returns the adapter in the
    form in which the runner applies it. Both may raise ``ModelLoadError``.
    """

    read: Callable[[Path], AdapterWeights]
    place: Callable[[AdapterWeights, str], Placed]
    loaded: RecentlyUsed[Placed] = field(init=False, factory=lambda: RecentlyUsed(_is_too_much))
    _failed: dict[Adapter, tuple[float, str]] = field(init=False, factory=dict)
    """Adapters that could not be applied: the time until which they are not read again, and the error.

    Only one thread at a time loads.
    """

    def get(self, adapter: Adapter) -> Placed:
        """Return an adapter, read from its files if necessary.

        Raises ``AdapterError``; for a while after that, it is raised again without reading.
        """
        return self.loaded.get(adapter.digest, lambda: self._load_unless_failed(adapter))

    def _load_unless_failed(self, adapter: Adapter) -> Placed:
        begun = monotonic()
        self._failed = {each: failed for each, failed in self._failed.items() if failed[0] > begun}
        if adapter in self._failed:
            raise AdapterError(self._failed[adapter][1])
        try:
            return self._load(adapter)
        except AdapterError as error:
            self._failed[adapter] = (now := monotonic()) + max(RETRY_S, (now - begun) / READING_SHARE), str(error)
            raise

    def _load(self, adapter: Adapter) -> Placed:
        folder = adapter.folder
        try:
            require(
                Path(folder).is_dir(), f"{folder} is not a folder on the machine that computes the model.", AdapterError
            )
            weights = self.read(Path(folder))
            require(
                weights.digest == adapter.digest,
                f"The files in {folder} have changed since the adapter was registered.",
                AdapterError,
            )
            return self.place(weights, folder)
        except ModelLoadError as error:
            raise AdapterError(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise AdapterError(f"{folder} does not fit into memory.") from error
