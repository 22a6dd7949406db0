"""A pretend accelerator for tests: device ``pretend`` of torch, whose memory is host memory.

Every operator runs on the host over the same memory, so numbers are real. As on CUDA, a host tensor
among device tensors raises, and so do ``.numpy()`` and a host generator. Importing this module
registers the device; nothing on the host changes. Written for torch 2.13 (the API that it stands
on is private and experimental).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretend"
HOST = torch.device("cpu")
_aten = torch.ops.aten
_as_host = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_storage_at = torch._C._construct_storage_from_data_pointer
_set = _aten.set_.source_Storage_storage_offset
_nbytes, _size = torch.UntypedStorage.nbytes, torch.UntypedStorage.size


class MixedDevices(RuntimeError):
    """A tensor or generator lies on another device than an operator's other tensors."""


class _Nothing:
    """A stream, an event, or the choice of a device: nothing runs beside anything else."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Module(_DummyBackendModule):
    """What ``torch.pretend`` answers, as ``torch.cuda`` does."""

    Stream = Event = device = _Nothing

    def stream(self, stream: Any) -> Any:
        return stream

    def current_stream(self, *_: Any) -> Any:
        return _Nothing()

    def set_device(self, *_: Any) -> None: ...
    def synchronize(self, *_: Any) -> None: ...
    def empty_cache(self) -> None: ...
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)


# -- one memory, two tensors ----------------------------------------------------------------------


def to_device(host: Tensor) -> Tensor:
    """A device tensor over the memory of a host tensor."""
    own = host.untyped_storage()
    storage = _storage_at(own.data_ptr(), DEVICE, _nbytes(own))
    storage._memory = own  # kept alive: torch keeps a storage's Python object
    new = torch._C._acc.create_empty_tensor((0,), host.dtype)
    return _set.redispatch(
        _as_host, new, storage, host.storage_offset(), host.size(), host.stride()
    )


def to_host(tensor: Tensor) -> Tensor:
    """A host tensor over the memory of a device tensor."""
    own = tensor.untyped_storage()
    new = torch.empty(0, dtype=tensor.dtype)
    if not _nbytes(own):  # may be an output, to which the operator gives its size
        return new if tensor.dim() == 1 else new.as_strided(tensor.size(), tensor.stride())
    storage = _storage_at(own.data_ptr(), HOST, _nbytes(own))
    storage._memory = own
    return new.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


# -- operators ------------------------------------------------------------------------------------

_SCALARS = frozenset(  # beside pointwise ones: operators that take 0-dim host tensors on CUDA
    f"aten::{name}{suffix}"
    for name in (
        "masked_fill", "fill", "where", "lerp", "clamp", "index_fill",
        "_foreach_add", "_foreach_mul", "_foreach_div",
    )
    for suffix in ("", "_")
)  # fmt: skip
_INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")
)


def _check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where CUDA does."""
    name = op._schema.name
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    if name in _INDEXING and given["self"].device.type == NAME:
        del given["indices"]  # may lie on the host
    scalars = torch.Tag.pointwise in op.tags or name in _SCALARS
    for value in tree_leaves(given):
        if isinstance(value, Tensor) and value.device.type == "cpu":
            if value.dim() or not scalars:
                raise MixedDevices(
                    f"Expected all tensors to be on the same device, but found at least two "
                    f"devices, {DEVICE} and cpu! ({op}, a host tensor {tuple(value.shape)})"
                )
        elif isinstance(value, torch._C.Generator) and value.device.type == "cpu":
            raise MixedDevices(f"Expected a '{NAME}' device type for generator but found 'cpu'")


@functools.cache
def _traits(op: Any) -> tuple[bool, tuple[int, ...], frozenset[int]]:
    """Whether an operator only gives a view, which arguments it writes, and which are tensors."""
    infos = [result.alias_info for result in op._schema.returns]
    arguments = list(enumerate(op._schema.arguments))
    writes = (number for number, argument in arguments if argument.is_write)
    tensors = (number for number, argument in arguments if str(argument.type) == "Tensor")
    is_view = any(info is not None and not info.is_write for info in infos)
    return is_view, tuple(writes), frozenset(tensors)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator, by that of the host."""
    is_view, written, tensors = _traits(op)
    if is_view:  # of sizes and strides alone
        return op.redispatch(_as_host, *args, **kwargs)
    _check(op, args, kwargs)
    args = tuple(  # a number in place of a tensor comes here as it is
        torch.tensor(value) if isinstance(value, int | float) and number in tensors else value
        for number, value in enumerate(args)
    )
    pairs: dict[int, tuple[Tensor, Tensor]] = {}  # device and host, by id of the device's

    def down(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == NAME:
            return pairs.setdefault(id(value), (value, to_host(value)))[1]
        return HOST if isinstance(value, torch.device) else value

    results = op(*tree_map(down, args), **tree_map(down, kwargs))
    names = [argument.name for argument in op._schema.arguments]
    for number in written:
        target = args[number] if number < len(args) else kwargs.get(names[number])
        for device in tree_leaves(target):
            if id(device) in pairs:
                _follow(*pairs[id(device)])
    known = {id(host): device for device, host in pairs.values()}

    def up(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return known[id(value)] if id(value) in known else to_device(value)
        return value

    return tree_map(up, results)


def _follow(device: Tensor, host: Tensor) -> None:
    """Take over the size that an operator gave its output."""
    if host.size() != device.size() or host.stride() != device.stride():
        new = to_device(host)
        _set.redispatch(_as_host, device, new.untyped_storage(), 0, host.size(), host.stride())


_ANY = torch.library.Library("_", "IMPL")
_ANY.fallback(_run, "PrivateUse1")
_ANY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_ATEN = torch.library.Library("aten", "IMPL")


def _kernel(name: str) -> Any:
    return lambda function: _ATEN.impl(name, function, "PrivateUse1")


@_kernel("_local_scalar_dense")
def _(tensor):
    return to_host(tensor).item()


@_kernel("_copy_from")
def _(source, target, non_blocking=False):
    here, there = (to_host(t) if t.device.type == NAME else t for t in (source, target))
    there.copy_(here)
    return target


@_kernel("_to_copy")
def _(tensor, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False,
      memory_format=None):  # fmt: skip
    copy = to_host(tensor).to(
        dtype=dtype or tensor.dtype, copy=True, memory_format=memory_format or torch.preserve_format
    )
    return copy if device is not None and torch.device(device) == HOST else to_device(copy)


@_kernel("set_.source_Storage_storage_offset")
def _(tensor, storage, offset, size, stride=()):
    return _set.redispatch(_as_host, tensor, storage, offset, size, stride)


@_kernel("set_.source_Storage")
def _(tensor, storage):
    number = _nbytes(storage) // tensor.element_size()
    return _set.redispatch(_as_host, tensor, storage, 0, (number,), (1,))


@_kernel("set_.source_Tensor")
def _(tensor, other):
    place = other.untyped_storage(), other.storage_offset(), other.size(), other.stride()
    return _set.redispatch(_as_host, tensor, *place)


@_kernel("resize_")
def _(tensor, size, *, memory_format=None):
    new = torch.empty(size, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    if _nbytes(new.untyped_storage()) > _nbytes(storage):
        new.view(-1)[: tensor.numel()].copy_(to_host(tensor).reshape(-1))
        storage = to_device(new).untyped_storage()
    return _set.redispatch(_as_host, tensor, storage, 0, new.size(), new.stride())


@_kernel("convolution_overrideable")
def _(*args):
    return _run(_aten.convolution.default, *args)


@_kernel("convolution_backward_overrideable")
def _(grad, value, weight, *rest):
    channels = weight.shape[1] * rest[5] if rest[3] else weight.shape[0]
    *rest, mask = rest
    bias = [channels] if mask[2] else None
    return _run(_aten.convolution_backward.default, grad, value, weight, bias, *rest, mask)


@_kernel("histc")
def _(tensor, bins=100, min=0, max=0):  # of whole numbers on CUDA, not on the host
    return to_device(torch.histc(to_host(tensor).double(), bins, min, max).to(tensor.dtype))


# -- what torch 2.13 leaves to C++ ---------------------------------------------------------------

# Module.to would make new parameters, and so lose ties and an optimizer's references.
torch.__future__.set_swap_module_params_on_conversion(True)
_new_storage, _resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_
_data, _empty, _generator = torch._C.TensorBase.data, torch.empty, torch.Generator


def _make_storage(cls, *args, device=None, **kwargs):
    if device is None or torch.device(device).type != NAME:
        return _new_storage(cls, *args, **({} if device is None else {"device": device}), **kwargs)
    own = _new_storage(cls, *args, **kwargs)
    storage = _storage_at(own.data_ptr(), DEVICE, _nbytes(own))
    storage._memory = own
    return storage


def _resize_storage(self, size):
    """To 0 and back: the memory stays, spoilt, so that who reads it meanwhile gets NaN."""
    if self.device.type != NAME:
        return _resize(self, size)
    if size == 0:
        memory = _storage_at(self.data_ptr(), HOST, _nbytes(self))
        torch.empty(0, dtype=torch.uint8).set_(memory).fill_(255)
    elif size > _nbytes(self):
        raise NotImplementedError("device memory does not grow here")
    self._freed = size == 0
    return self


def _set_data(self, value):
    """``parameter.data = parameter.data.to(device)``, which torch takes on CUDA."""
    if (self.device.type == NAME) == (value.device.type == NAME):
        _data.__set__(self, value)
        return
    value = value.detach()
    if isinstance(self, torch.nn.Parameter):
        value = torch.nn.Parameter(value, self.requires_grad)
    torch.utils.swap_tensors(self, value)


class _Generator(torch._C.Generator):
    """A generator of the host that says that it is one of the device."""

    def __new__(cls, device="cpu"):
        there = torch.device(device).type == NAME
        made = super().__new__(cls, device="cpu" if there else device)
        made.there = there
        return made

    @property
    def device(self):
        return DEVICE if self.there else super().device


_device_constructors()  # remembers torch.empty itself, for `with device:`
torch.UntypedStorage.__new__ = _make_storage
torch.UntypedStorage.resize_ = _resize_storage
torch.UntypedStorage.nbytes = lambda self: 0 if getattr(self, "_freed", False) else _nbytes(self)
torch.UntypedStorage.size = lambda self: 0 if getattr(self, "_freed", False) else _size(self)
setattr(
    torch.UntypedStorage,
    NAME,
    lambda self, *_, **__: torch.UntypedStorage(_nbytes(self), device=DEVICE).copy_(self),
)
torch.Tensor.data = property(lambda self: _data.__get__(self), _set_data)  # noqa: PLW0108 - a descriptor of C
torch.Tensor.pin_memory = lambda self, device=None: self
torch.empty = lambda *args, pin_memory=False, **kwargs: _empty(*args, **kwargs)  # noqa: PLW0108 - without pin_memory
torch.Generator = _Generator


class ComputesOnHost(RuntimeError):
    """A module is called whose weights lie on the host."""


def refuse_modules_of_the_host() -> None:
    """Let the forward pass of a module raise unless its own parameters and buffers lie here.

    Where everything was left on the host nothing mixes, and no operator would complain.
    """

    def check(module: torch.nn.Module, _: Any) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.device.type == "cpu":
                raise ComputesOnHost(f"{type(module).__name__} computes on the host")

    torch.nn.modules.module.register_module_forward_pre_hook(check)


def serve_collectives() -> None:
    """Let gloo, and all that stands on it (DTensor, FSDP2), take device tensors."""
    import torch.distributed

    library = torch.library.Library("c10d", "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::"):
            name, _, overload = full.removeprefix("c10d::").partition(".")
            op = getattr(getattr(torch.ops.c10d, name), overload or "default")
            library.impl(op, functools.partial(_run, op), "PrivateUse1", allow_override=True)
    _KEPT.append(library)


_KEPT: list[Any] = []
if torch.distributed.is_available():
    serve_collectives()
