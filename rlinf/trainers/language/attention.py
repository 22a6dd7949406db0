"""Causal attention over sequences that stand one behind the other, for a transformers model.

Registered under the library's extension point for attention functions. Linear layers and norms see
no padding; here alone the sequences stand side by side, padded on the right, where causality hides
the padding, so that no mask is built. Z heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.trainers.language.layout import Segment

NAME = "rlinf_packed"
_UNSUPPORTED = ("softcap", "s_aux", "head_mask")


def register() -> None:
    """Let models be switched to this attention by its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


class _Spread(torch.autograd.Function):
    """Rows [T, …] to places [P, …]; the gradient of padding is dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, padded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    segments: tuple[Segment, ...] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Each token looks at those before it in its own sequence.

    Args:
        module: The attention layer.
        query: [1, Z, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: Not used.
        scaling: Factor of the scores.
        segments: Where the sequences stand.
        options: What the architecture asks for besides.

    Returns:
        [1, T, Z, D], and nothing for the attention weights.

    Raises:
        ConfigError: The architecture needs what this function does not compute.
    """
    window = options.get("sliding_window")
    longest = max(segment.shape[1] for segment in segments)
    refused = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if window is not None and window < longest:
        refused.append("sliding_window")
    if refused:
        raise ConfigError(
            f"{type(module).__name__} uses {refused[0]}, which is not computed without padding; "
            "nearest: false",
            key="packing",
        )
    rows = [tensor.transpose(1, 2)[0] for tensor in (query, key, value)]
    parts = [_attend(segment, rows, scaling) for segment in segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend(segment: Segment, rows: list[Tensor], scaling: float | None) -> Tensor:
    """[T, Z, D] of one segment from [T, Z or K, D] of queries, keys and values of all."""
    spread = []
    for tensor in rows:
        part = tensor[segment.tokens]
        if segment.padded is not None:
            part = _Spread.apply(  # type: ignore[no-untyped-call]
                part, segment.padded, segment.places
            )
        spread.append(part.reshape(*segment.shape, *part.shape[1:]).transpose(1, 2))
    query, key, value = spread
    half = query.device.type == "cpu" and query.dtype != torch.float32
    if half:
        # Torch's kernel for this on CPU is several times slower backward than the one for float32.
        query, key, value = query.float(), key.float(), value.float()
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    flat = attended.transpose(1, 2).flatten(0, 1)
    if half:
        flat = flat.to(rows[0].dtype)
    return flat if segment.places is None else flat.index_select(0, segment.places)
