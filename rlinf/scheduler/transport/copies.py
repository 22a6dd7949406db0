"""Copies of what one worker gives another in the same process, as if it had travelled."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.scheduler.transport.payload import not_sendable

if TYPE_CHECKING:
    import torch

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes)


def private_copy(value: Any) -> Any:
    """A value of which the giver can change no part that the receiver sees, nor the other way.

    Copied are tensors, arrays, lists, mappings, tuples, sets, and dataclasses, however they lie in
    each other, and configurations of OmegaConf. Frozen dataclasses and all other objects are passed
    by reference: they are data that nobody changes, or know themselves how they are shared.

    Raises:
        SchedulerTypeError: It is nested too deeply.
    """
    try:
        return _copy(value, {})
    except RecursionError as error:
        raise not_sendable(error) from error


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if id(value) in seen:  # as in a pickle, what is there twice, or holds itself, stays so
        return seen[id(value)]
    copied: Any
    if kind in (list, dict, OrderedDict, defaultdict, deque, set, bytearray):
        copied = seen[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for key, each in value.items():
                copied[key] = _copy(each, seen)
        elif isinstance(value, list | deque):
            copied.clear()
            copied.extend(_copy(each, seen) for each in value)
        return copied  # what is in a set cannot change
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        parts = [_copy(each, seen) for each in value]
        copied = tuple(parts) if kind is tuple else kind._make(parts)
    elif is_dataclass(value) and not isinstance(value, type):
        return _copy_dataclass(value, seen)
    else:
        copied = _copy_data(value)
    seen[id(value)] = copied
    return copied


def _copy_dataclass(value: Any, seen: dict[int, Any]) -> Any:
    if value.__dataclass_params__.frozen:
        return value
    copied = seen[id(value)] = copy.copy(value)
    for field in fields(value):
        if hasattr(value, field.name):
            setattr(copied, field.name, _copy(getattr(value, field.name), seen))
    return copied


def _copy_data(value: Any) -> Any:
    """A copy of a tensor, an array or a configuration; anything else itself."""
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    torch, omegaconf = sys.modules.get("torch"), sys.modules.get("omegaconf")
    if torch is not None and isinstance(value, torch.Tensor):
        return _copy_tensor(value)
    if omegaconf is not None and isinstance(value, omegaconf.Container):
        return copy.deepcopy(value)
    return value


def _copy_tensor(value: torch.Tensor) -> torch.Tensor:
    import torch

    copied = value.detach().clone()
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_() if value.requires_grad else copied
