"""Puts received weights into a model, all or none of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf.engines.protocol import Weights

_PREFIX = "base_model.model."


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to a LoRA adapter."""
    return "lora_" in name


def adapter_file_name(name: str, adapter: str = "default") -> str:
    """The name that a parameter of an adapter has in the adapter's file.

    ``model.layers.0.q_proj.lora_A.default.weight`` becomes
    ``base_model.model.model.layers.0.q_proj.lora_A.weight``.
    """
    plain = name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
    return plain if plain.startswith(_PREFIX) else _PREFIX + plain


def assign_weights(model: nn.Module, weights: Weights, *, may_be_empty: bool) -> None:
    """Copy values into the parameters and persistent buffers of a model.

    Args:
        model: A transformers model, perhaps with LoRA layers.
        weights: Everything (a tied tensor once or under each of its names); for a model with an
            adapter every tensor of the adapter by the names of its file; or nothing.
        may_be_empty: Whether nothing is legal, as the values are already there.

    Raises:
        ValueError: A name is unknown or missing, or a shape differs; then nothing was changed.
    """
    given = dict(weights)
    if not given:
        if not may_be_empty:
            raise ValueError("no weights were given, and the engine shares none with a trainer")
        return
    if any(map(is_adapter, model.state_dict())):
        # Whole weights would be taken for merged ones, to which the adapter is added once more.
        targets = {
            adapter_file_name(name): value
            for name, value in model.state_dict().items()
            if is_adapter(name)
        }
    else:
        targets = dict(model.state_dict())
    _check(given, targets)
    with torch.no_grad():
        for name, value in given.items():
            if targets[name].data_ptr() != value.data_ptr():
                targets[name].copy_(value)


def _check(given: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    unknown = sorted(given.keys() - targets.keys())
    if unknown:
        raise ValueError(f"{len(unknown)} weights are unknown to the model, such as {unknown[0]}")
    written = {targets[name].data_ptr() for name in given}
    missing = sorted(name for name, value in targets.items() if value.data_ptr() not in written)
    if missing:
        raise ValueError(f"{len(missing)} weights of the model are missing, such as {missing[0]}")
    for name, value in given.items():
        if value.shape != targets[name].shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(targets[name].shape)}")
