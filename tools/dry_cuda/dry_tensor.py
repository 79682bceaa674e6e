"""Tensors that say they are on a GPU, and are not: what a GPU refuses is refused, what it would wait for is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from dry_report import WAITS, call_site, count

_PINNED: dict[int, int] = {}  # address: bytes; of memory that is freed this may go on to say so
_STATE = threading.local()


class Tape:
    """A CUDA graph: what was launched, in order."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


def current_tape() -> Tape | None:
    """Return what this thread records to."""
    return getattr(_STATE, "tape", None)


def set_tape(tape: Tape | None) -> None:
    """Begin or end recording."""
    _STATE.tape = tape


def set_sync_debug_mode(mode: int | str) -> None:
    """As torch's, of this thread alone."""
    _STATE.forbids_waits = mode in ("error", 2)


def waits(what: str) -> None:
    """Note that the host waits for the device; while a graph is recorded this is an error, and where torch is asked."""
    if getattr(_STATE, "forbids_waits", False) and not what.startswith(("Event", "Stream", "synchronize", "settle")):
        raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
    if current_tape() is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    count(WAITS, (what, call_site()))


def note_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a tensor's memory is page-locked."""
    storage = tensor.untyped_storage()
    _PINNED[storage.data_ptr()] = storage.nbytes()
    return tensor


def page_lock(address: int, num_bytes: int, flags: int) -> int:
    """Note that memory is page-locked; return CUDA's success."""
    assert not flags
    _PINNED[address] = num_bytes
    return 0


def page_unlock(address: int) -> int:
    """Note that it is not any more."""
    del _PINNED[address]
    return 0


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor's memory is page-locked."""
    return tensor.untyped_storage().data_ptr() in _PINNED


class DryTensor(torch.Tensor):
    """A tensor of a device, around one in main memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> DryTensor:
        with torch.inference_mode(False):  # views of tensors made outside of inference mode must be like these
            return torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=device,
            )

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        waits("tolist")
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu()")

    def record_stream(self, stream: Any) -> None:
        pass

    def is_pinned(self, *args: Any) -> bool:
        return False

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __repr__(self, **kwargs: Any) -> str:
        return f"{self.device} {self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return run(func, args, kwargs or {})


class _Call:
    """Arguments of an operation, unwrapped."""

    def __init__(self) -> None:
        self.wrappers: dict[int, DryTensor] = {}
        self.devices: set[torch.device] = set()
        self.on_host: list[torch.Tensor] = []

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, DryTensor):
            self.wrappers[id(value.inner)] = value
            self.devices.add(value.device)
            return value.inner
        if isinstance(value, torch.Tensor):
            self.on_host.append(value)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self.unwrap(item) for item in value)
        return value

    def wrap(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, DryTensor):
            return value
        if isinstance(value, torch.Tensor):
            known = self.wrappers.get(id(value))
            if known is None:
                return DryTensor(value, device)
            if known.shape != value.shape:
                raise NotImplementedError(
                    f"an operation made {tuple(value.shape)} of {tuple(known.shape)}: tell dry_torch"
                )
            return known
        if isinstance(value, (list, tuple)):
            return type(value)(self.wrap(item, device) for item in value)
        return value


def on_device(device: torch.device | str) -> torch.device:
    """Return the device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
}
_COPIES = {"copy_", "_to_copy"}
_HOST_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
_RESHAPING = {"resize_", "set_", "t_", "transpose_", "unsqueeze_", "squeeze_", "swapdims_"}


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation of which an argument is on a device."""
    parts = func.decompose(*args, **kwargs)  # in inference mode torch leaves that to others
    if parts is not NotImplemented:
        return parts
    name = func._schema.name.split("::")[1]
    call = _Call()
    inner_args, inner_kwargs = call.unwrap(args), {key: call.unwrap(value) for key, value in kwargs.items()}
    if name in _RESHAPING:
        raise NotImplementedError(f"a dry run knows no {name}")
    device = next(iter(call.devices), torch.device("cpu"))
    target = device
    if inner_kwargs.get("device") is not None:
        target = torch.device(inner_kwargs["device"])
        target = on_device(target) if target.type == "cuda" else target
        inner_kwargs["device"] = torch.device("cpu")
    inner_kwargs.pop("pin_memory", None)
    _check(func, name, call, args, inner_args, inner_kwargs, target)
    if name == "copy_" and not isinstance(args[0], DryTensor):
        target = torch.device("cpu")
    result = _compute(func, name, inner_args, inner_kwargs)
    if target.type == "cpu":
        if name == "_to_copy" and inner_kwargs.get("non_blocking"):
            note_pinned(result)
        return result
    return call.wrap(result, target)


def _check(
    func: Any, name: str, call: _Call, args: tuple, inner_args: tuple, kwargs: dict[str, Any], target: torch.device
) -> None:
    if name in _COPIES:
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        for host in call.on_host:
            if host.numel() and not (is_pinned(host) and non_blocking):
                waits("copy of pinned memory" if is_pinned(host) else "copy of pageable memory")
        if name == "_to_copy" and target.type == "cpu" and not non_blocking:
            waits("copy to the host")
        return
    for host in call.on_host:
        if host.dim() == 0:
            if name in _HOST_INDEXED:
                waits("a number assigned through indices")
            continue
        if name in _HOST_INDEXED and host.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8):
            waits("indices on the host")
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {call.devices} and a host tensor "
            f"{tuple(host.shape)} {host.dtype}"
        )
    if len(call.devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {call.devices}")
    if name in _HOST_INDEXED and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in inner_args[1]
    ):
        waits("a mask as index")
    if name == "repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None:
        waits("repeat_interleave without output_size")
    if name in _WAITING:
        waits(name)


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    if name == "_fused_sdp_choice":
        return 0  # by products: the others are other operations on other devices
    function = _varlen_attention if name.startswith("_varlen_attn") else _SKIPPED.get(name, func)
    result = function(*args, **kwargs)
    tape = current_tape()
    if tape is not None:
        given = {_storage(leaf) for leaf in _leaves((args, tuple(kwargs.values())))}
        made = [leaf if _storage(leaf) not in given else None for leaf in _leaves(result)]
        if func._schema.is_mutable or any(leaf is not None for leaf in made):
            tape.calls.append(lambda: _again(function, args, kwargs, made))
    elif name in ("empty_like", "new_empty", "empty", "new_empty_strided", "empty_strided"):
        result.zero_()
    return result


_SKIPPED: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b, dtype=None, out=None: a.new_zeros(a.shape[0], b.shape[1], dtype=dtype) if out is None else out,
    "bmm": lambda a, b, out=None: a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if out is None else out,
    "addmm": lambda c, a, b, **kwargs: a.new_zeros(a.shape[0], b.shape[1]),
    "addmm_": lambda c, a, b, **kwargs: c,
    "_addmm_activation": lambda c, a, b, **kwargs: a.new_zeros(a.shape[0], b.shape[1]),
    "sort": lambda x, *args, **kwargs: (torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int64)),
    "histc": lambda x, bins=100, *args, **kwargs: x.new_zeros(bins),
    "_grouped_mm": lambda a, b, *args, **kwargs: a.new_zeros(len(a), b.shape[-1]),
    "softmax": lambda x, *args, **kwargs: torch.zeros_like(x),
    "_softmax": lambda x, *args, **kwargs: torch.zeros_like(x),
    "normal_": lambda x, *args, **kwargs: x,
    "uniform_": lambda x, *args, **kwargs: x,
}
"""Operations that take long: zeros of the result's shape in their place."""


def _again(function: Any, args: tuple, kwargs: dict[str, Any], made: list[torch.Tensor | None]) -> None:
    for kept, new in zip(made, _leaves(function(*args, **kwargs)), strict=True):
        if kept is not None:
            kept.copy_(new)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return []


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _varlen_attention(q: torch.Tensor, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return what the operation behind `torch.nn.attention.varlen` returns, all zeros."""
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.zeros_like(q), lse, torch.zeros((), dtype=torch.uint64)
