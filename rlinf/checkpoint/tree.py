"""What a checkpoint may hold: a nested dict, list or tuple of tensors, arrays, numbers, text …

It is written as tensors, which are named by their place in the tree, as a JSON pointer (RFC 6901):
``/policy/trunk.0.weight``, and as JSON for all the rest."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import RunFailure
from rlinf.processes.byte_layout import flat_bytes

TAG = "$"
"""A JSON object that has this key is not a dict of the tree but a value that JSON cannot say."""

_MAX_DEPTH = 100
_BATCHED_BYTES = 1 << 20
_JSON_INTEGER_BITS = 63
_INLINE_BYTES = 256
_UNKNOWN_TO_SAFETENSORS = {torch.complex128, torch.complex32}


@dataclass(frozen=True)
class EncodedTree:
    """A snapshot of a tree: JSON-able ``structure``, and the data that it names."""

    structure: Any
    copies: dict[str, Tensor]
    arrays: dict[str, np.ndarray]

    def tensors(self) -> dict[str, Tensor]:
        """All data as CPU tensors. Left to the writer: a run may hold a thousand small arrays."""
        return self.copies | {name: torch.from_numpy(a) for name, a in self.arrays.items()}


class UnstorableError(RunFailure, TypeError):
    """The state of a component, of the user's own perhaps, holds what no checkpoint can."""


def encode(tree: Any) -> EncodedTree:
    """Return a snapshot of ``tree`` that later changes of its tensors do not reach.

    Raises:
        UnstorableError: A value that cannot be stored, or a tree that contains itself, and where.
    """
    encoder = _Encoder()
    structure = encoder.encode(tree, ())
    copies = clone_to_cpu(list(encoder.tensors.values()))
    named = dict(zip(encoder.tensors, copies, strict=True))
    return EncodedTree(structure, named, encoder.arrays)


def decode(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that :func:`encode` took apart; ValueError for what it cannot have made."""
    if isinstance(structure, list):
        return [decode(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if TAG in structure:
        return _decode_tagged(structure[TAG], structure.get("value"), tensors)
    return {key: decode(item, tensors) for key, item in structure.items()}


def clone_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous CPU copies that share no memory with ``tensors``.

    Small tensors on an accelerator are gathered there first, so that a thousand of them cost one
    transfer and not a thousand.
    """
    copies: dict[int, Tensor] = {}
    small: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu" and 0 < tensor.nbytes <= _BATCHED_BYTES:
            small.setdefault(tensor.device, []).append(index)
        else:
            copied = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            copies[index] = copied
    for indices in small.values():
        gathered = _gather([tensors[index] for index in indices])
        copies.update(zip(indices, gathered, strict=True))
    return [copies[index] for index in range(len(tensors))]


def _gather(tensors: list[Tensor]) -> list[Tensor]:
    """Copy through one byte buffer, widest elements first so that every view is aligned."""
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    flat = [flat_bytes(tensors[i].detach()) for i in order]
    buffer = torch.cat(flat).cpu()
    copies: dict[int, Tensor] = {}
    offset = 0
    for index in order:
        tensor = tensors[index]
        view = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
        copies[index] = view.reshape(tensor.shape)
        offset += tensor.nbytes
    return [copies[index] for index in range(len(tensors))]


class _Encoder:
    """One walk over a tree; collects tensors, and copies of arrays, under their names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or type(value) in (bool, str, int, float):
            return _encode_plain(value)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_array(value, path)
        if type(value) is not bytes:
            return self._encode_container(value, path)
        if len(value) <= _INLINE_BYTES:
            return {TAG: "bytes", "value": base64.b64encode(value).decode()}
        name = _pointer(path)
        self.arrays[name] = np.frombuffer(bytearray(value), dtype=np.uint8)
        return {TAG: "blob", "value": name}

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > _MAX_DEPTH:
            raise UnstorableError(
                f"state at {_pointer(path[:5])}/…: nested deeper than {_MAX_DEPTH} levels; "
                "does it contain itself?"
            )
        if isinstance(value, Mapping):
            for key in value:
                if type(key) is not str:
                    raise UnstorableError(
                        f"state at {_pointer(path)}: the key {key!r} is a "
                        f"{type(key).__qualname__}; keys must be text, for example {str(key)!r}"
                    )
            items = {key: self.encode(item, (*path, key)) for key, item in value.items()}
            return items if TAG not in items else {TAG: "dict", "value": list(items.items())}
        if type(value) in (list, tuple):
            items_ = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return items_ if type(value) is list else {TAG: "tuple", "value": items_}
        raise UnstorableError(
            f"state at {_pointer(path)}: a {type(value).__qualname__} cannot be stored. A "
            "checkpoint holds dicts, lists and tuples of tensors, arrays, numbers, text, bytes "
            "and None, so that loading it runs no code"
        )

    def _encode_tensor(self, value: Tensor, path: tuple[str, ...]) -> Any:
        dense = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        if not dense or value.dtype in _UNKNOWN_TO_SAFETENSORS:
            raise UnstorableError(
                f"state at {_pointer(path)}: this tensor cannot be stored ({value.dtype}, "
                f"{value.layout}, {value.device}); only dense ones with data can"
            )
        name = _pointer(path)
        self.tensors[name] = value
        return {TAG: "tensor", "value": name}

    def _encode_array(self, value: np.ndarray | np.generic, path: tuple[str, ...]) -> Any:
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 8:
            raise UnstorableError(
                f"state at {_pointer(path)}: an array of dtype {value.dtype} cannot be stored, "
                "only booleans and numbers of up to 64 bits"
            )
        name = _pointer(path)
        self.arrays[name] = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {TAG: "array" if isinstance(value, np.ndarray) else "scalar", "value": name}


def _encode_plain(value: bool | str | int | float | None) -> Any:
    # Other JSON readers turn wide integers into floats, and Python itself limits their digits.
    if isinstance(value, int) and value.bit_length() > _JSON_INTEGER_BITS:
        return {TAG: "int", "value": hex(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: "float", "value": repr(value)}
    return value


def _pointer(path: tuple[str, ...]) -> str:
    joined = "\n".join(path)
    if "~" in joined or "/" in joined:
        path = tuple(part.replace("~", "~0").replace("/", "~1") for part in path)
    return "/" + "/".join(path)


_DECODED: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
    "blob": lambda tensor: tensor.numpy().tobytes(),
}


def _decode_tagged(kind: Any, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match kind:
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "bytes":
            return base64.b64decode(value, validate=True)
        case "tuple":
            return tuple(decode(item, tensors) for item in value)
        case "dict":
            return {key: decode(item, tensors) for key, item in value}
    if kind not in _DECODED:
        raise ValueError(f"unknown kind of value {kind!r}")
    if value not in tensors:
        raise ValueError(f"the tensor {value} is missing")
    return _DECODED[kind](tensors[value])
