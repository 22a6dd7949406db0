"""What several vision-language-action models have in common: sizes, SigLIP, layers, the prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import BiasedAttention, Heads, KeyValue, RotaryAttention

_EPSILON = 1e-6
_PERIODS = (4e-3, 4.0)
"""Shortest and longest period of the sinusoids that tell the denoising time."""


@dataclass(frozen=True)
class TransformerSize:
    """Width, number of layers and inner width of a transformer."""

    width: int
    depth: int
    mlp: int


@dataclass(frozen=True, kw_only=True)
class FlowSize(Heads):
    """What the shapes of all weights of a model that denoises actions follow from.

    Args:
        vision: Tower that reads pictures.
        language: Language model that reads what the tower says, and text.
        expert: What denoises actions.
        vision_heads: Heads of ``vision``.
        patch: Pixels of the edge of what becomes one token.
        image: Pixels of the edge of a picture.
        horizon: H, actions that are denoised together.
        action_dim: A, padded.
        state_dim: D, padded.
    """

    vision: TransformerSize
    language: TransformerSize
    expert: TransformerSize
    vision_heads: int
    vocabulary: int
    patch: int
    image: int
    horizon: int
    action_dim: int
    state_dim: int


@dataclass(frozen=True)
class Prefix:
    """What has been read: pictures and text.

    Args:
        past: Keys and values per layer, each [B, heads, P, d].
        mask: [B, P], which tokens there are.
        hidden: [B, P, W] the last hidden states of the language model.
    """

    past: list[KeyValue]
    mask: Tensor
    hidden: Tensor

    @property
    def mean(self) -> Tensor:
        """[B, W] of the hidden states of what there is."""
        there = self.mask.unsqueeze(-1).to(self.hidden.dtype)
        return (self.hidden * there).sum(1) / there.sum(1)

    def feature(self, which: str) -> Tensor:
        """[B, W], the ``mean``, or the hidden state of the ``first`` or the ``last`` of what there
        is."""
        if which == "mean":
            return self.mean
        there = self.mask.to(torch.int8)  # the first of equal ones is the largest
        last = self.mask.shape[1] - 1 - there.flip(1).argmax(dim=1)
        place = there.argmax(dim=1) if which == "first" else last
        return self.hidden[torch.arange(len(place), device=place.device), place]


class VisionLayer(nn.Module):
    """A layer of SigLIP: attention and a perceptron, each behind a norm."""

    def __init__(self, size: TransformerSize, heads: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.self_attn = BiasedAttention(size.width, heads)
        self.layer_norm2 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.fc1 = nn.Linear(size.width, size.mlp)
        self.fc2 = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] to [B, L, W]."""
        normed = self.layer_norm1(x)
        x = x + self.self_attn(normed, normed, normed)
        inner = functional.gelu(self.fc1(self.layer_norm2(x)), approximate="tanh")
        out: Tensor = x + self.fc2(inner)
        return out


class Vision(nn.Module):
    """SigLIP without its pooling head, and the projection to the width of the language model."""

    def __init__(self, size: FlowSize) -> None:
        super().__init__()
        width, patches = size.vision.width, (size.image // size.patch) ** 2
        self.patch_embedding = nn.Conv2d(3, width, size.patch, stride=size.patch)
        self.position_embedding = nn.Embedding(patches, width)
        self.layers = nn.ModuleList(
            VisionLayer(size.vision, size.vision_heads) for _ in range(size.vision.depth)
        )
        self.post_layernorm = nn.LayerNorm(width, eps=_EPSILON)
        self.projector = nn.Linear(width, size.language.width)

    def patches(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] in [−1, 1] to [B, patches, W of vision]."""
        x = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        x = x.flatten(2).transpose(1, 2) + self.position_embedding.weight
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.post_layernorm(x)
        return out

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] in [−1, 1] to [B, patches, W]."""
        out: Tensor = self.projector(self.patches(pixels))
        return out


class LlamaLayer(nn.Module):
    """A layer of Llama, of a language model or of an expert, around its attention."""

    def __init__(
        self, size: TransformerSize, attention: RotaryAttention, *, epsilon: float
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.width, eps=epsilon)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(size.width, eps=epsilon)
        self.gate_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.down_proj = nn.Linear(size.mlp, size.width, bias=False)

    def forward(
        self, x: Tensor, places: KeyValue, mask: Tensor, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue | None]:
        """[B, L, W] to [B, L, W], and keys and values [B, heads, L, d], if it has some of its own:
        what was given is not given back, as FSDP2 takes it for a view."""
        change, own = self.self_attn(self.input_layernorm(x), places, mask, past)
        x = x + change
        normed = self.post_attention_layernorm(x)
        inner = functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        return x + self.down_proj(inner), None if own is past else own


def sinusoids(time: Tensor, width: int) -> Tensor:
    """[B] to [B, width]; in float64 where the device has it, as angles go up to 1571."""
    exact = torch.float32 if time.device.type == "mps" else torch.float64
    fraction = torch.linspace(0, 1, width // 2, dtype=exact, device=time.device)
    shortest, longest = _PERIODS
    angles = 2 * math.pi * time[:, None].to(exact) / (shortest * (longest / shortest) ** fraction)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
