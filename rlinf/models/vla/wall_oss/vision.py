"""The vision tower of Qwen2.5-VL: patches in windows, and every few layers all together.

https://arxiv.org/abs/2502.13923, section 2.1. Pictures may be of any shape whose edges are whole
numbers of merged patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import KeyValue, rotary_angles, rotated
from rlinf.models.vla.transformer import TransformerSize

_EPSILON = 1e-6
_FRAMES = 2  # that a patch spans in a film; a picture is shown as often
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class TowerLayer(nn.Module):
    """Attention and a gated perceptron with biases, each behind a norm."""

    def __init__(self, size: TransformerSize, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(size.width, eps=_EPSILON)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm2 = nn.RMSNorm(size.width, eps=_EPSILON)
        self.gate_proj = nn.Linear(size.width, size.mlp)
        self.up_proj = nn.Linear(size.width, size.mlp)
        self.down_proj = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor, rotary: KeyValue, mask: Tensor | None) -> Tensor:
        """[B, L, W] to [B, L, W]; each sees those of ``mask`` [L, L]."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(q, rotary), rotated(k, rotary), v, attn_mask=mask
        )
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        out: Tensor = x + self.down_proj(
            functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        )
        return out


class Tower(nn.Module):
    """Patches, layers, and the perceptron that makes a token of a square of them.

    Args:
        size: Of the layers.
        heads: Of their attention.
        patch: Edge of a patch in pixels.
        merge: As many by as many patches become one token.
        window: As many by as many tokens see each other.
        whole: Layers in which all patches do.
        out: Width of a token.
    """

    def __init__(
        self,
        size: TransformerSize,
        *,
        heads: int,
        patch: int,
        merge: int,
        window: int,
        whole: tuple[int, ...],
        out: int,
    ) -> None:
        super().__init__()
        self.merge, self.window, self.whole = merge, window, whole
        self.patch, self.head_dim = patch, size.width // heads
        frames = (_FRAMES, patch, patch)
        self.patch_embedding = nn.Conv3d(3, size.width, frames, stride=frames, bias=False)
        self.layers = nn.ModuleList(TowerLayer(size, heads) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width, eps=_EPSILON)
        inner = size.width * merge**2
        self.merge_in = nn.Linear(inner, inner)
        self.merge_out = nn.Linear(inner, out)

    def grid(self, pixels: Tensor) -> tuple[int, int]:
        """Rows and columns of tokens of pictures [B, 3, H, W]."""
        edge = self.patch * self.merge
        return pixels.shape[-2] // edge, pixels.shape[-1] // edge

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [0, 1] to [B, rows · columns, W]."""
        weight = self.patch_embedding.weight
        mean, deviation = (pixels.new_tensor(each).view(-1, 1, 1) for each in (_MEAN, _DEVIATION))
        scaled = ((pixels - mean) / deviation).to(weight.dtype)
        # A picture is shown twice, which is once by the sum of the weights of both times.
        x = functional.conv2d(scaled, weight.sum(2), stride=self.patch)
        rows, columns = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        places = torch.arange(rows * columns, device=x.device)
        row, column = places // columns, places % columns
        rotary = _of_both(row, column, self.head_dim)
        edge = self.merge * self.window
        of_window = row // edge * -(-columns // edge) + column // edge
        near = of_window[:, None] == of_window[None]
        for number, layer in enumerate(self.layers):
            x = layer(x, rotary, None if number in self.whole else near)
        x = self.norm(x).unflatten(1, (rows // self.merge, self.merge, -1, self.merge))
        x = x.transpose(2, 3).flatten(3).flatten(1, 2)
        out: Tensor = self.merge_out(functional.gelu(self.merge_in(x)))
        return out


def _of_both(row: Tensor, column: Tensor, head_dim: int) -> KeyValue:
    """Cosines and sines [1, 1, L, d/2], the first half by rows and the second by columns."""
    (cosines, sines), (more, others) = (
        rotary_angles(each[None], head_dim // 2) for each in (row, column)
    )
    return torch.cat([cosines, more], dim=-1), torch.cat([sines, others], dim=-1)
