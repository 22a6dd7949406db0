"""Attention layers that networks of several families share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = 1e-6

KeyValue = tuple[Tensor, Tensor]


class BiasedAttention(nn.Module):
    """Attention with biases, as of SigLIP and of ACT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None
    ) -> Tensor:
        """[B, L, W] from queries [B or 1, L, W], keys and values [B, M, W] of which ``seen`` [B, M]
        are looked at."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj(queries), self.k_proj(keys), self.v_proj(values))
        )
        mask = None if seen is None else seen[:, None, None]
        mixed = functional.scaled_dot_product_attention(q.expand(len(k), -1, -1, -1), k, v, mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many of queries, how many of keys and values, and how wide each is."""

    heads: int
    kv_heads: int
    head_dim: int


class RotaryAttention(nn.Module):
    """Attention of Gemma: few heads of keys and values, rotary positions, no biases.

    Of Qwen3, with ``normed``: queries and keys of each head are normalised. Of Qwen2.5, with
    ``bias``: they and the values have biases.
    """

    def __init__(
        self, width: int, heads: Heads, *, normed: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        each = self.head_dim = heads.head_dim
        self.q_norm, self.k_norm = (
            nn.RMSNorm(each, eps=_EPSILON) if normed else nn.Identity() for _ in range(2)
        )
        self.q_proj = nn.Linear(width, heads.heads * each, bias=bias)
        self.k_proj = nn.Linear(width, heads.kv_heads * each, bias=bias)
        self.v_proj = nn.Linear(width, heads.kv_heads * each, bias=bias)
        self.o_proj = nn.Linear(heads.heads * each, width, bias=False)

    def forward(
        self, x: Tensor, rotary: KeyValue, mask: Tensor, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """What [B, L, W] see of themselves and of the past; and their own keys and values."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(self.q_norm(q), rotary), rotated(self.k_norm(k), rotary)
        own = (k, v.clone())  # FSDP2 warns of layers that give back a view
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), own


def causal_mask(there: Tensor) -> Tensor:
    """[B, 1, L, L] of tokens that see those before them, of those that are ``there`` [B, L].

    One that is not there sees itself, so that nothing becomes NaN.
    """
    length = there.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=there.device).tril()
    alone = torch.eye(length, dtype=torch.bool, device=there.device)
    return (before & there[:, None] | alone)[:, None]


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> KeyValue:
    """Cosines and sines [B, 1, L, d/2] of rotary positions."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None, :, None].float() * base**-exponents
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotary: KeyValue) -> Tensor:
    """[B, heads, L, d] turned by :func:`rotary_angles`."""
    (cosine, sine), (first, second) = rotary, x.float().chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(x.dtype)
