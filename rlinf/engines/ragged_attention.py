"""Attention over a batch of sequences of unequal lengths, for a transformers model.

Registered under the public extension point for attention functions, so that the architectures stay
the library's. Key and value caches are not repeated for grouped queries, no mask tensor is built
for the whole batch, and rows of similar length are computed together, each set only as far as its
longest sequence. n rows, H heads, K key-value heads, W window, D dimension of a head's keys and V
that of its values, which differ in latent attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError

NAME = "rlinf_ragged"

_BLOCK = 8  # rows whose window is decided together
_WORTH = 400  # rows × columns of needless attention that cost about as much as another segment
_UNSUPPORTED = ("softcap", "s_aux", "sliding_window", "position_bias")


def register() -> None:
    """Make the attention function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ragged_attention)


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows that attend as far as the longest of them."""

    rows: slice  # of the batch
    window: int  # W, columns that they look at
    bias: Tensor  # [rows, 1, 1, W], 0 where a row may look and -inf elsewhere


@dataclass(frozen=True)
class DecodePlan:
    """Who looks where in one decoding step."""

    segments: Sequence[Segment]  # rows of the batch in order
    gather: Tensor | None = None  # [n] rows of the cache; None: the first n


def plan_segments(lengths: np.ndarray, *, dtype: torch.dtype, device: torch.device) -> DecodePlan:
    """Divide rows, which look at ``lengths`` [n] columns each, into segments of similar lengths."""
    n, start, window = len(lengths), 0, 0
    bounds: list[tuple[int, int, int]] = []
    for first in range(0, n, _BLOCK):
        longest = int(lengths[first : first + _BLOCK].max())
        waste = (first - start) * (longest - window) if longest > window else 0
        waste = max(waste, _BLOCK * (window - longest))
        if start < first and waste > _WORTH:
            bounds.append((start, first, window))
            start, window = first, 0
        window = max(window, longest)
    bounds.append((start, n, window))
    positions = torch.from_numpy(lengths).to(device)
    return DecodePlan([_segment(*bound, positions, dtype) for bound in bounds])


def _segment(first: int, last: int, window: int, lengths: Tensor, dtype: torch.dtype) -> Segment:
    columns = torch.arange(window, device=lengths.device)
    beyond = columns >= lengths[first:last, None]
    bias = torch.zeros(last - first, window, dtype=dtype, device=lengths.device)
    return Segment(slice(first, last), window, bias.masked_fill_(beyond, -torch.inf)[:, None, None])


def plan_block(
    gather: Tensor, lengths: np.ndarray, window: int, *, dtype: torch.dtype, device: torch.device
) -> DecodePlan:
    """One segment of a fixed shape, its rows gathered from anywhere in the cache."""
    positions = torch.from_numpy(lengths).to(device)
    return DecodePlan([_segment(0, len(lengths), window, positions, dtype)], gather)


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: DecodePlan | None = None,
    attended: list[Any] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the last token (with a plan) or of whole prompts (without).

    Args:
        module: The attention layer.
        query: [n, H, 1, D], or [n, H, P, D] for prompts padded on the right.
        key: [rows, K, capacity, D] the cache, or [n, K, P, D].
        value: [rows, K, capacity, V], or [n, K, P, V].
        attention_mask: Not used: the plan and causality say everything.
        scaling: Factor of the scores.
        plan: Which part of the cache each row looks at.
        attended: Gets the layer, to see which come here.
        options: What the architecture asks for besides.

    Returns:
        [n, 1 or P, H, V], and nothing for the attention weights.

    Raises:
        ConfigError: The architecture needs what this function does not compute.
    """
    if attended is not None:
        attended.append(module)
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}, which the engine `hf` does not compute; "
                "use the engine `vllm`"
            )
    if plan is None:
        grouped = query.shape[1] != key.shape[1]
        whole = functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=grouped
        )
        return whole.transpose(1, 2).contiguous(), None
    rows, heads, _, dim = query.shape
    grouped_query = query.view(rows, key.shape[1], -1, dim)
    parts = []
    for segment in plan.segments:
        keys, values = key[:, :, : segment.window], value[:, :, : segment.window]
        if plan.gather is None:
            keys, values = keys[segment.rows], values[segment.rows]
        else:
            keys, values = keys.index_select(0, plan.gather), values.index_select(0, plan.gather)
        parts.append(_attend(grouped_query[segment.rows], keys, values, segment.bias, scaling))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(rows, 1, heads, value.shape[-1]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """[n, K, H/K, V] of queries [n, K, H/K, D]."""
    if query.dtype == torch.float32:
        scores = torch.matmul(query, key.transpose(2, 3)).mul_(scaling).add_(bias)
        return torch.matmul(scores.softmax(-1), value)
    # This one accumulates half-precision products in float32.
    mask = bias.expand(*query.shape[:3], key.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
