"""The transformers of GR00T's head: one that looks over what was read, and one that denoises.

Layers are those of a diffusion transformer (DiT, https://arxiv.org/abs/2212.09748). Those that
denoise attend in turn to what was read and to each other, behind a norm that the denoising time
scales and shifts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.vla.transformer import TransformerSize

_EPSILON = 1e-5
_LAST_EPSILON = 1e-6
_LONGEST = 10_000.0
_TIME_WIDTH = 256


class HeadAttention(nn.Module):
    """Attention with biases, of each token to all, or to tokens of another width."""

    def __init__(self, width: int, heads: int, *, read: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k, self.to_v = (nn.Linear(read or width, width) for _ in range(2))
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        """What [B, L, W] see of [B, P, W'], those of ``mask`` [B, P]; [B, L, W]."""
        q, k, v = (
            layer(each).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, each in ((self.to_q, x), (self.to_k, seen), (self.to_v, seen))
        )
        there = None if mask is None else mask[:, None, None]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=there)
        out: Tensor = self.to_out(mixed.transpose(1, 2).flatten(2))
        return out


class HeadLayer(nn.Module):
    """Attention and a perceptron, each behind a norm.

    Args:
        size: Width and inner width.
        heads: Of the attention.
        timed: The first norm is scaled and shifted by the denoising time, and no norm has weights.
        read: Width of the tokens that are attended to; None: the layer's own tokens.
    """

    def __init__(
        self, size: TransformerSize, heads: int, *, timed: bool, read: int | None = None
    ) -> None:
        super().__init__()
        self.crosses = read is not None
        self.norm1, self.norm3 = (
            nn.LayerNorm(size.width, eps=_EPSILON, elementwise_affine=not timed) for _ in range(2)
        )
        self.time_proj = nn.Linear(size.width, 2 * size.width) if timed else None
        self.attention = HeadAttention(size.width, heads, read=read)
        self.ff_in = nn.Linear(size.width, size.mlp)
        self.ff_out = nn.Linear(size.mlp, size.width)

    def forward(
        self, x: Tensor, time: Tensor | None, seen: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """[B, L, W] with the time [B, W], and [B, P, W'] of ``mask`` [B, P] where they are seen."""
        normed = self.norm1(x)
        if self.time_proj is not None:
            assert time is not None
            scale, shift = self.time_proj(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
            normed = normed * (1.0 + scale) + shift
        x = x + self.attention(normed, normed if seen is None else seen, mask)
        inner = functional.gelu(self.ff_in(self.norm3(x)), approximate="tanh")
        out: Tensor = x + self.ff_out(inner)
        return out


class SelfAttention(nn.Module):
    """Layers in which all that was read sees all."""

    def __init__(self, size: TransformerSize, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HeadLayer(size, heads, timed=False) for _ in range(size.depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, P, W] of ``mask`` [B, P] to [B, P, W]."""
        for layer in self.layers:
            x = layer(x, None, None, mask)
        return x


class DiffusionTransformer(nn.Module):
    """Every second layer attends to what was read, the others to the tokens themselves.

    Args:
        size: Of its layers.
        heads: Of their attention.
        read: Width of what was read.
        out: Width of its results.
    """

    def __init__(self, size: TransformerSize, heads: int, *, read: int, out: int) -> None:
        super().__init__()
        self.time_in = nn.Linear(_TIME_WIDTH, size.width)
        self.time_out = nn.Linear(size.width, size.width)
        self.layers = nn.ModuleList(
            HeadLayer(size, heads, timed=True, read=None if place % 2 else read)
            for place in range(size.depth)
        )
        self.norm_out = nn.LayerNorm(size.width, eps=_LAST_EPSILON, elementwise_affine=False)
        self.proj_out_1 = nn.Linear(size.width, 2 * size.width)
        self.proj_out_2 = nn.Linear(size.width, out)

    def forward(self, x: Tensor, bucket: Tensor, read: Tensor, mask: Tensor) -> Tensor:
        """[B, L, W] at time buckets [B], beside [B, P, W'] of ``mask`` [B, P], to [B, L, out]."""
        told = time_waves(bucket, _TIME_WIDTH, spread=_TIME_WIDTH // 2 - 1).flip(-2).flatten(-2)
        time = self.time_out(functional.silu(self.time_in(told.to(x.dtype))))
        for layer in self.layers:
            crosses = bool(layer.crosses)
            x = layer(x, time, read if crosses else None, mask if crosses else None)
        shift, scale = self.proj_out_1(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        out: Tensor = self.proj_out_2(self.norm_out(x) * (1.0 + scale) + shift)
        return out


def time_waves(bucket: Tensor, width: int, *, spread: int) -> Tensor:
    """Sines and cosines [B, 2, width / 2] float32 of time buckets [B], whose longest period is
    reached at ``spread``."""
    places = torch.arange(width // 2, dtype=torch.float32, device=bucket.device)
    angles = bucket.float()[:, None] * torch.exp(-math.log(_LONGEST) * places / spread)
    return torch.stack([angles.sin(), angles.cos()], dim=1)
