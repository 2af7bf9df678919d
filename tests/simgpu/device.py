"""The simulated device, registered with torch: ``torch.simgpu`` has what is used of ``torch.cuda``."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _DummyDeviceGuard, _setup_privateuseone_for_python_backend

from tests.simgpu import graphs, streams
from tests.simgpu.activity import LOCK, activities, call_site
from tests.simgpu.memory import MEMORY
from tests.simgpu.sim_tensor import NAME, Settings, dispatch
from tests.simgpu.streams import NO_STACKS, ORDER

DEVICES = 2


class DeviceModule:
    """``torch.simgpu``. Available only within ``simulated_device``, for the sake of other tests in the process."""

    Stream = streams.Stream
    Event = streams.Event
    CUDAGraph = graphs.CUDAGraph
    graph = staticmethod(graphs.graph)
    graph_pool_handle = staticmethod(graphs.graph_pool_handle)
    current_stream = staticmethod(streams.current_stream)
    stream = staticmethod(streams.stream)
    synchronize = staticmethod(streams.synchronize)
    current_device = staticmethod(streams.current_device)
    set_device = staticmethod(streams.set_device)
    is_on = False

    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: DEVICES)
    get_device_capability = staticmethod(lambda _=None: (9, 0))  # Hopper's
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    manual_seed_all = staticmethod(lambda seed: None)  # the device draws no numbers
    _is_in_bad_fork = staticmethod(lambda: False)

    def is_available(self) -> bool:
        return self.is_on

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = streams.current_device()
        streams.set_device(device)
        try:
            yield
        finally:
            streams.set_device(torch.device(NAME, before))

    def get_sync_debug_mode(self) -> int:
        """Return 2 if synchronisations are refused, else 0."""
        return 2 if Settings.refuses_synchronisations else 0

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Set whether synchronisations are refused, as ``error`` and 2 say; warns each time, not once as torch."""
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=2,
        )
        Settings.refuses_synchronisations = mode in (2, "error")

    def mem_get_info(self, _: Any = None) -> tuple[int, int]:
        """Return the free bytes and all bytes."""
        return MEMORY.capacity - MEMORY.in_use, MEMORY.capacity

    def memory_reserved(self, _: Any = None) -> int:
        """Return the bytes in use, since there is no cache."""
        return MEMORY.in_use

    def set_per_process_memory_fraction(self, fraction: float, _: Any = None) -> None:
        """Limit this process, as ``torch.cuda`` does."""
        assert 0 <= fraction <= 1
        MEMORY.limit = int(fraction * MEMORY.capacity)

    def empty_cache(self) -> None:
        """Return cached memory, of which there is none; the host waits."""
        with LOCK:
            for activity in activities():
                activity.synchronisations.append(f"empty_cache: {call_site()}")


MODULE = DeviceModule()


class Hook(torch._C._acc.PrivateUse1Hooks):
    """What torch asks of an accelerator."""

    def is_available(self) -> bool:
        return MODULE.is_on

    def has_primary_context(self, _: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


_registered: list[Any] = []


def _dispatch(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(operation, args, kwargs)


def _register() -> None:
    if _registered:
        return
    _device_constructors()  # a cache, which must not have what is patched below
    _setup_privateuseone_for_python_backend(NAME, MODULE, Hook(), _DummyDeviceGuard())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_dispatch, "PrivateUse1")
    # torch makes these by resizing an empty tensor, which a tensor that wraps another cannot follow.
    numbers = torch.library.Library("aten", "IMPL")
    for overload in ("arange", "arange.start", "arange.start_step"):
        operation = getattr(torch.ops.aten.arange, overload.partition(".")[2] or "default")
        numbers.impl(overload, partial(_dispatch, operation), "PrivateUse1")
    _registered.extend((library, numbers))


# -- the host's memory ------------------------------------------------------------------------------------

_pinned: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def _pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage
    return tensor


def _is_pinned(tensor: Tensor, _: Any = None) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage()._cdata in _pinned


def _pin_copy(tensor: Tensor, _: Any = None) -> Tensor:
    """As ``Tensor.pin_memory``: a copy that the host makes."""
    return tensor if _is_pinned(tensor) else _pin(tensor.clone())


def _host_factory(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.empty`` and the like with ``pin_memory``, which a CPU build refuses."""

    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = factory(*args, **kwargs)
        return _pin(made) if pin_memory else made

    return make


def _from_data(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.tensor`` and the like, whose data comes from pageable memory."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return factory(data, *args, device=device, **kwargs)
        return factory(data, *args, **kwargs).to(device)

    return make


@contextmanager
def simulated_device(*, capacity: int | None = None) -> Iterator[torch.device]:
    """Have a simulated device within the block, with so many bytes of memory."""
    _register()
    gc.collect()  # of tensors of an earlier block
    ORDER.reset()
    MEMORY.peak = MEMORY.in_use
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "is_on", True)
        patch.setattr(_sanitizer, "traceback", NO_STACKS)
        patch.setattr(MEMORY, "capacity", capacity)
        patch.setattr(MEMORY, "limit", None)
        patch.setattr(torch, "empty", _host_factory(torch.empty))
        patch.setattr(torch, "tensor", _from_data(torch.tensor))
        patch.setattr(torch, "as_tensor", _from_data(torch.as_tensor))
        patch.setattr(Tensor, "pin_memory", _pin_copy)
        patch.setattr(Tensor, "is_pinned", _is_pinned)
        # Else torch puts a converted parameter's metadata into the old object, which keeps what it wraps.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        yield torch.device(NAME, 0)
