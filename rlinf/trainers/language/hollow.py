"""Exchanges the parameters of a module for others, such as ones without memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put another parameter in the place of each; the former ones stay as they are.

    Args:
        module: Changed in place.
        make: Called once for each parameter, a tied one included, which stays tied.
    """
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in found:
                found[id(parameter)] = make(parameter)
            setattr(part, name, found[id(parameter)])


def take_weights(module: nn.Module) -> dict[str, Tensor]:
    """Leave a module without weights: its parameters are float32 on the device ``meta``.

    Returns:
        Its weights by name, as they were, a tied one once.
    """
    weights: dict[str, Tensor] = dict(module.named_parameters())
    replace_parameters(module, _hollow)
    return weights


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty(parameter.shape, device="meta", dtype=torch.float32)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
