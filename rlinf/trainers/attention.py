"""Causal attention over sequences that stand one behind the other, for a transformers model.

Registered under the library's extension point for attention functions. Linear layers and norms see
no padding, and a prompt of several sequences once; here alone the sequences stand whole side by
side, padded on the right, where causality hides the padding, so that no mask is built. T rows,
F places, Z heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.trainers.layout import Arrangement

NAME = "rlinf_packed"
_UNSUPPORTED = ("softcap", "s_aux", "head_mask")


def register() -> None:
    """Let models be switched to this attention by its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


class _Spread(torch.autograd.Function):
    """Rows [T, …] to places [F, …]; the gradient of a row is the sum of those at its places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arrangement: Arrangement) -> Tensor:
        ctx.arrangement = arrangement
        assert arrangement.padded is not None
        return rows.index_select(0, arrangement.padded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        arrangement, flat = ctx.arrangement, gradient.flatten(1)
        if len(arrangement.places) == len(arrangement.chosen):
            summed = flat.index_select(0, arrangement.chosen)
        else:
            summed = functional.embedding_bag(
                arrangement.places, flat, arrangement.offsets, mode="sum"
            )
        return summed.view(-1, *gradient.shape[1:]), None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    arrangement: Arrangement | None = None,
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
        arrangement: Where the sequences stand.
        options: What the architecture asks for besides.

    Returns:
        [1, T, Z, D], and nothing for the attention weights.

    Raises:
        ConfigError: The architecture needs what this function does not compute.
    """
    window = options.get("sliding_window")
    assert arrangement is not None
    refused = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if window is not None and window < arrangement.longest:
        refused.append("sliding_window")
    if refused:
        raise ConfigError(
            f"{type(module).__name__} uses {refused[0]}, which is not computed without padding; "
            "nearest: false",
            key="packing",
        )
    rows = [tensor.transpose(1, 2)[0] for tensor in (query, key, value)]
    if arrangement.padded is not None:
        rows = [_Spread.apply(part, arrangement) for part in rows]  # type: ignore[no-untyped-call]
    parts, first = [], 0
    for number, length in arrangement.shapes:
        places = slice(first, first + number * length)
        block = [part[places].reshape(number, length, *part.shape[1:]) for part in rows]
        parts.append(_attend(block, scaling))
        first = places.stop
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if arrangement.chosen is not None:
        flat = flat.index_select(0, arrangement.chosen)
    return flat.unsqueeze(0), None


def _attend(block: list[Tensor], scaling: float | None) -> Tensor:
    """[n · W, Z, D] from [n, W, Z or K, D] of queries, keys and values."""
    query, key, value = (part.transpose(1, 2) for part in block)
    dtype = query.dtype
    if query.device.type == "cpu" and dtype != torch.float32:
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
    return attended.transpose(1, 2).flatten(0, 1).to(dtype)
