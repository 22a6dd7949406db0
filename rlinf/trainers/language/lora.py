"""Low-rank adapters by peft inside a model, and their two written forms: merged, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rlinf.models.adapters import is_adapter


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    layers = [part for part in adapted_layers(model).values() if hasattr(part, "base_layer")]
    # Peft's own switch also changes which parameters are trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_name(name: str) -> str | None:
    """The name of a frozen parameter in the model without adapters; None for an adapter's."""
    return None if is_adapter(name) else name.replace(".base_layer.", ".")


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    """W + s · B A, computed in float32.

    Args:
        weight: [out, in].
        first: A, [rank, in].
        second: B, [out, rank].
        scale: s.
    """
    return (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)
