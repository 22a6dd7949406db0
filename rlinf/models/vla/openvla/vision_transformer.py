"""Vision transformers as OpenVLA looks through (Dosovitskiy et al. 2021), named as timm names them.

Written here and not taken from timm: that imports torchvision, whose wheels beside a torch without
CUDA break the import of torchvision and, with it, of the models of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = 1e-6


@dataclass(frozen=True)
class VisionSize:
    """What the shapes of all weights follow from.

    Args:
        width: Of a token.
        depth: Blocks of the published model; the last one is not computed.
        heads: Of attention.
        mlp: Inner width of the perceptrons.
        patch: Side of a patch in pixels.
        registers: Tokens beside those of the patches, the class token not counted (Darcet et al.
            2024); None: there is no class token either.
        layer_scale: Whether each branch has a factor per channel (Touvron et al. 2021).
        pooling: Whether the published model ends in a pooling by attention.
    """

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int = 14
    registers: int | None = None
    layer_scale: bool = False
    pooling: bool = False


DINOV2 = VisionSize(1024, 24, 16, 4096, registers=4, layer_scale=True)
"""DINOv2 L/14 with registers (Oquab et al. 2023)."""
SIGLIP = VisionSize(1152, 27, 16, 4304, pooling=True)
"""SigLIP So400m/14 (Zhai et al. 2023)."""


class VisionTransformer(nn.Module):
    """Features [B, patches, width] of pictures, after the block before the last.

    Args:
        size: Of the published model.
        image_size: Side of a picture in pixels.
        language_width: Of the mean embedding of an instruction that modulates each block by FiLM;
            None: none does.
    """

    def __init__(
        self, size: VisionSize, image_size: int, *, language_width: int | None = None
    ) -> None:
        super().__init__()
        width, self.patches = size.width, (image_size // size.patch) ** 2
        self.prefix = 0 if size.registers is None else 1 + size.registers
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, kernel_size=size.patch, stride=size.patch)}
        )
        self.pos_embed = nn.Parameter(torch.randn(1, self.patches, width) * 0.02)
        if size.registers is not None:
            self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
            self.reg_token = nn.Parameter(torch.randn(1, size.registers, width) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(size) for _ in range(size.depth - 1))
        self.film: nn.ModuleList | None = None
        if language_width is not None:
            self.film = nn.ModuleList(Film(language_width, width) for _ in self.blocks)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Features of B pictures.

        Args:
            pixels: [B, 3, H, W], normalised.
            language: [B, language_width], where FiLM is used.
        """
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        if self.prefix:
            first = torch.cat([self.cls_token, self.reg_token], dim=1)
            x = torch.cat([first.expand(len(x), -1, -1), x], dim=1)
        for block, film in zip(self.blocks, self.film or [None] * len(self.blocks), strict=True):
            x = block(x, None if film is None else film(language))
        return cast(Tensor, x[:, self.prefix :])


class VisionBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual connection."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.attn = FusedAttention(size.width, size.heads)
        self.ls1 = LayerScale(size.width) if size.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.mlp = Perceptron(size.width, size.mlp, size.width)
        self.ls2 = LayerScale(size.width) if size.layer_scale else nn.Identity()

    def forward(self, x: Tensor, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B, N, width]; FiLM, [B, 1, width] each, acts between attention and perceptron."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if film is not None:
            x = x * film[0] + film[1]
        return cast(Tensor, x + self.ls2(self.mlp(self.norm2(x))))


class FusedAttention(nn.Module):
    """Self-attention whose queries, keys and values are one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width]."""
        parts = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(found.transpose(1, 2).flatten(2)))


class Perceptron(nn.Module):
    """Linear layers ``fc1``, ``fc2`` … from each width to the next, GELU between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = [f"fc{number}" for number in range(1, len(widths))]
        for name, pair in zip(self.layers, pairwise(widths), strict=True):
            self.add_module(name, nn.Linear(*pair))

    def forward(self, x: Tensor) -> Tensor:
        """[..., first width] to [..., last width]."""
        for name in self.layers[:-1]:
            x = functional.gelu(getattr(self, name)(x))
        return cast(Tensor, getattr(self, self.layers[-1])(x))


class LayerScale(nn.Module):
    """A factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width]."""
        return x * self.gamma


class Film(nn.Module):
    """Factor 1 + γ and shift β of all channels, linear in the mean embedding of an instruction
    (Perez et al. 2018); both begin at 1 and 0."""

    def __init__(self, language_width: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Linear(language_width, width)
        self.shift = nn.Linear(language_width, width)
        for layer in (self.scale, self.shift):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, language: Tensor) -> tuple[Tensor, Tensor]:
        """[B, language_width] to two [B, 1, width]."""
        return 1 + self.scale(language).unsqueeze(1), self.shift(language).unsqueeze(1)


def unread_names(size: VisionSize) -> list[str]:
    """Names in published files of what lies behind the features: the last block and the end."""
    block = [f"blocks.{size.depth - 1}.{name}" for name in VisionBlock(size).state_dict()]
    ends = ["norm.weight", "norm.bias"]
    if size.pooling:
        layers = ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
        ends += ["attn_pool.latent"]
        ends += [f"attn_pool.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    return [*block, *ends]
