"""Tensors on the simulated device, and what each operation on them is there."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from tests.simgpu.activity import LOCK, SimulatedFaultError, activities, call_site
from tests.simgpu.attention import scaled_dot_product_attention, varlen_attention
from tests.simgpu.graphs import capture_of_thread
from tests.simgpu.memory import MEMORY, Arena, allocation_of
from tests.simgpu.streams import ORDER, Stream, current_stream

aten = torch.ops.aten

NAME = "simgpu"


def aten_names(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


READ_BY_HOST = aten_names(
    "_local_scalar_dense nonzero masked_select equal _unique2 unique_dim unique_consecutive bincount"
)
"""Operations whose result, or its shape, the host reads."""

NO_KERNEL = aten_names("empty empty_strided empty_like new_empty lift_fresh")

FUSED = aten_names("linear layer_norm rms_norm gelu silu")
"""Operators that torch would divide and CUDA does not, or not by much."""

CPU = torch.device("cpu")


class Settings:
    """``refuses_synchronisations`` as ``torch.cuda.set_sync_debug_mode`` has it."""

    refuses_synchronisations = False


class SimTensor(Tensor):
    """A tensor of the simulated device: ``raw`` has its values, on the CPU."""

    raw: Tensor
    allocation: Any

    @staticmethod
    def __new__(cls, raw: Tensor, index: int, pool: Arena | None = None) -> "SimTensor":  # noqa: PYI034  (torch makes it)
        made: SimTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, index),
        )
        made.raw = raw
        made.allocation = allocation_of(raw, pool)
        return made

    def __repr__(self, **options: Any) -> str:
        return f"SimTensor({self.raw}, {self.device})"

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """As ``torch.Tensor.record_stream``."""
        self.allocation.other_streams.add(stream.number)

    def tolist(self) -> Any:
        """As ``torch.Tensor.tolist``, which refuses subclasses."""
        _read_by_host("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.nn.functional.scaled_dot_product_attention:
                return launch("sdpa", scaled_dot_product_attention, args, kwargs or {})
            if function in (Tensor.__getitem__, Tensor.__setitem__):
                args = (args[0], _with_tensors(args[1]), *args[2:])
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operation, args, kwargs or {})


def _with_tensors(index: Any) -> Any:
    """Return an index with tensors for its lists, as torch makes of them: on the host."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments."""
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def raw_of(value: Any) -> Any:
    """Return the tensor, or the device, that stands for one of the simulated device."""
    if isinstance(value, SimTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == NAME:
        return CPU
    return value


def dispatch(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do what an operator does on the device."""
    name = operation.name().partition(".")[0]
    if name not in FUSED:
        # In inference mode operators come here before torch has divided them into those that devices implement.
        parts = operation.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    if name == "aten::copy_":
        return copy(args[0], args[1], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if name in ("aten::_to_copy", "aten::to") and target is not None and target.type == "cpu":
        _read_by_host("copy to the host")
        found = args[0].raw
        for activity in activities():
            activity.copies_to_host += 1
            activity.to_host_bytes += found.nbytes
            activity.blocking_copies.append(f"to the host: {call_site()}")
        return found.to(dtype=kwargs.get("dtype") or found.dtype, copy=True)
    _require_one_device(name, args, kwargs)
    if name in READ_BY_HOST or _indexes_by_mask(name, args) or _repeats_unknown(name, args, kwargs):
        _read_by_host(name.removeprefix("aten::"))
    if name == "torch_attn::_varlen_attn":
        return launch("varlen_attn", varlen_attention, args, kwargs)
    return launch(name.removeprefix("aten::"), operation, args, kwargs)


def launch(name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``function`` on the raw tensors, and note what it reads and writes."""
    used = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, SimTensor)]
    devices = {tensor.device.index for tensor in used} | {
        value.index or 0
        for value in tree_iter((args, kwargs))
        if isinstance(value, torch.device) and value.type == NAME
    }
    capture = capture_of_thread()
    raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
    storages = {tensor.raw.untyped_storage()._cdata for tensor in used}
    schema = getattr(function, "_schema", None)
    mutates = schema is not None and schema.is_mutable
    temporary = 0
    if function is scaled_dot_product_attention:
        temporary = _note_attention(name, args, kwargs)
    elif function is varlen_attention:
        _note_attention(name, args, kwargs)
    with LOCK:
        MEMORY.require(temporary)
        MEMORY.note_peak(temporary)
    index, pool = min(devices, default=0), None if capture is None else capture.arena

    def wrap(value: Any) -> Any:
        return SimTensor(value, index, pool) if isinstance(value, Tensor) else value

    # Without inference mode: torch cannot count versions of a view whose wrapper was made in it and its base not.
    with torch.inference_mode(mode=False), torch.no_grad():
        computed = _compute(function, raw_args, raw_kwargs)
        outputs = _same_objects(computed, raw_args, args) if mutates else tree_map(wrap, computed)
    made = [tensor for tensor in tensors_in(outputs) if isinstance(tensor, SimTensor)]
    is_view = not mutates and bool(made) and all(out.raw.untyped_storage()._cdata in storages for out in made)
    if is_view:
        if capture is not None:
            capture.keep(made)
        return outputs
    if not (f"aten::{name}" in NO_KERNEL or name in NO_KERNEL):
        reads, writes = _accesses(schema, args, kwargs, used, made)
        with LOCK:
            seq = ORDER.launch(name, reads, writes)
            stream = current_stream().number
            for tensor in (*used, *made):
                tensor.allocation.uses[stream] = seq
            for activity in activities():
                activity.kernels["capture" if capture is not None else name] += 1
    if capture is not None:
        capture.note(function, raw_args, raw_kwargs, computed, mutates=mutates, made=(*used, *made))
    return outputs


def _compute(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except NotImplementedError:  # on the CPU in half precision
        wide = tree_map(lambda value: value.float() if isinstance(value, Tensor) else value, (args, kwargs))
        return function(*wide[0], **wide[1]).to(next(tensors_in(args)).dtype)


def _same_objects(computed: Any, raw_args: Any, args: Any) -> Any:
    """Return for each raw output of an operation in place the argument that it is."""
    by_raw = {id(raw): given for raw, given in zip(tree_iter(raw_args), tree_iter(args), strict=True)}
    return tree_map(lambda value: by_raw.get(id(value), value), computed)


def _accesses(
    schema: Any, args: Any, kwargs: Any, used: list[SimTensor], made: list[SimTensor]
) -> tuple[set[int], set[int]]:
    writes = {tensor.allocation.data_ptr for tensor in made}
    if schema is not None:
        by_name = {argument.name: argument for argument in schema.arguments}
        given = [
            *zip(schema.arguments, args, strict=False),
            *((by_name[key], kwargs[key]) for key in kwargs if key in by_name),
        ]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes |= {tensor.allocation.data_ptr for tensor in tensors_in(value) if isinstance(tensor, SimTensor)}
    return {tensor.allocation.data_ptr for tensor in used}, writes


def copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
    """Copy within the device, to it, or from it."""
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        launch("copy_", aten.copy_.default, (target, source), {})
        return target
    capture = capture_of_thread()
    is_asynchronous = non_blocking and (target if isinstance(source, SimTensor) else source).is_pinned()
    if not is_asynchronous:
        if capture is not None:
            raise SimulatedFaultError("operation not permitted when stream is capturing: a copy that blocks")
        _require_allowed("a copy that blocks")
        for activity in activities():
            activity.blocking_copies.append(
                f"{source.device.type} to {target.device.type}, {source.nbytes} bytes: {call_site()}"
            )
    assert capture is None
    on_device: Any = target if isinstance(target, SimTensor) else source
    way = "to_device" if on_device is target else "to_host"
    allocation, stream = on_device.allocation, current_stream().number
    with LOCK:
        reads, writes = (set(), {allocation.data_ptr}) if way == "to_device" else ({allocation.data_ptr}, set())
        allocation.uses[stream] = seq = ORDER.launch(f"copy {way}", reads, writes)
        for activity in activities():
            setattr(activity, f"copies_{way}", getattr(activity, f"copies_{way}") + 1)
            setattr(activity, f"{way}_bytes", getattr(activity, f"{way}_bytes") + source.nbytes)
        if way == "to_device":
            _write(on_device.raw, source)
        elif is_asynchronous:
            # The host sees the values once it has waited; until then, others.
            values = on_device.raw.clone()
            target.view(torch.uint8).fill_(255)
            ORDER.pending.append((stream, seq, lambda: _write(target, values)))
        else:
            _write(target, on_device.raw)
    return target


def _write(target: Tensor, values: Tensor) -> None:
    with torch.inference_mode():  # which tensors of either kind may be written to in
        target.copy_(values)


def _read_by_host(what: str) -> None:
    if capture_of_thread() is not None:
        raise SimulatedFaultError(f"operation not permitted when stream is capturing: {what}")
    _require_allowed(what)
    with LOCK:
        for activity in activities():
            activity.synchronisations.append(f"{what}: {call_site()}")


def _require_allowed(what: str) -> None:
    if Settings.refuses_synchronisations:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def _indexes_by_mask(name: str, args: Any) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    # One number for all of a single mask is a masked fill, which reads nothing.
    return bool(masks) and not (name != "aten::index" and len(masks) == len(args[1]) == 1 and args[2].numel() == 1)


def _repeats_unknown(name: str, args: Any, kwargs: Any) -> bool:
    if name != "aten::repeat_interleave" or isinstance(args[-1], int):
        return False
    return kwargs.get("output_size") is None


def _require_one_device(name: str, args: Any, kwargs: Any) -> None:
    """Raise as torch does for tensors of two devices; indices on the CPU are copied, for which the host waits."""
    found = list(tensors_in((args, kwargs)))
    devices = {tensor.device for tensor in found if tensor.dim() or isinstance(tensor, SimTensor)}
    if len(devices) < 2:
        return
    if name.startswith("aten::index") and {device.type for device in devices} == {NAME, "cpu"}:
        with LOCK:
            for activity in activities():
                activity.blocking_copies.append(f"indices on the CPU: {call_site()}")
        return
    raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {sorted(map(str, devices))}")


def _note_attention(name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """Count an attention; return the bytes that it needs for a mask."""
    query = args[0] if args else kwargs["query"]
    mask = args[3] if len(args) > 3 and name == "sdpa" else kwargs.get("attn_mask")
    with LOCK:
        for activity in activities():
            activity.attentions.append((name, tuple(query.shape)))
            if name == "sdpa":
                activity.masks.append(None if mask is None else tuple(mask.shape))
            if mask is not None and torch.backends.cuda.cudnn_sdp_enabled():
                activity.cudnn_plans.add((query.shape[0], query.shape[-2]))
    # A mask of truth values is made one of numbers, in its own shape.
    return mask.numel() * query.element_size() if mask is not None and mask.dtype == torch.bool else 0
