"""The graph of SmolVLA: a small vision-language model reads, a narrower expert denoises actions.

https://arxiv.org/abs/2506.01844. The first layers of SmolVLM2 (SigLIP, and a Llama) read pictures,
text and the state. Each layer of the expert stands beside one of them: every second attends to the
keys and values of that layer and to the actions before, the others to projections of these keys and
values alone. The names of weights in published files are in
:mod:`rlinf.models.vla.smolvla.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import Heads, KeyValue, RotaryAttention, rotary_angles, rotated
from rlinf.models.vla.transformer import (
    FlowSize,
    LlamaLayer,
    Prefix,
    TransformerSize,
    Vision,
    sinusoids,
)

_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class SmolVLASize(FlowSize):
    """What the shapes of all weights follow from; the defaults are those of the published model.

    Args:
        vision: SigLIP.
        language: The first 16 of the 32 layers of SmolVLM2-500M.
        expert: 0.75 of its width.
        shuffle: As many by as many patches become one token.
        every: Of so many layers of the expert the first attends to actions too.
    """

    vision: TransformerSize = TransformerSize(768, 12, 3072)
    language: TransformerSize = TransformerSize(960, 16, 2560)
    expert: TransformerSize = TransformerSize(720, 16, 2048)
    vision_heads: int = 12
    heads: int = 15
    kv_heads: int = 5
    head_dim: int = 64
    vocabulary: int = 49280
    patch: int = 16
    image: int = 512
    horizon: int = 50
    action_dim: int = 32
    state_dim: int = 32
    shuffle: int = 4
    every: int = 2


class ShuffledVision(Vision):
    """SigLIP, of which a square of patches becomes one token of the language model."""

    def __init__(self, size: SmolVLASize) -> None:
        super().__init__(size)
        self.shuffle = size.shuffle
        inputs = size.vision.width * size.shuffle**2
        self.projector = nn.Linear(inputs, size.language.width, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] in [−1, 1] to [B, patches / shuffle², W]."""
        x = self.patches(pixels)
        side = math.isqrt(x.shape[1]) // self.shuffle
        x = x.reshape(len(x), side, self.shuffle, side, self.shuffle, x.shape[-1]).transpose(2, 3)
        out: Tensor = self.projector(x.flatten(3).flatten(1, 2))
        return out


class CrossAttention(RotaryAttention):
    """Attention to projections of the keys and values of another layer."""

    def __init__(self, width: int, heads: Heads) -> None:
        super().__init__(width, heads)
        given = heads.kv_heads * heads.head_dim
        self.k_proj, self.v_proj = (nn.Linear(given, given, bias=False) for _ in range(2))

    def forward(
        self, x: Tensor, places: KeyValue, mask: Tensor, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """What [B, L, W] see of the past, whose keys and values are given back."""
        assert past is not None
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = (
            layer(each.transpose(1, 2).flatten(2))
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for layer, each in zip((self.k_proj, self.v_proj), past, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(q, places), k, v, attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), past


@dataclass(frozen=True)
class Visibility:
    """Where tokens are and what they see: positions [B, L], mask [B, 1, L, keys]."""

    positions: Tensor
    mask: Tensor


class Llama(nn.Module):
    """Layers and a last norm; the language model has embeddings as well."""

    def __init__(
        self, size: TransformerSize, whole: SmolVLASize, *, vocabulary: int = 0, every: int = 1
    ) -> None:
        super().__init__()
        self.head_dim = whole.head_dim
        if vocabulary:
            self.embed_tokens = nn.Embedding(vocabulary, size.width)
        self.attentions = [
            CrossAttention if place % every else RotaryAttention for place in range(size.depth)
        ]
        self.layers = nn.ModuleList(
            LlamaLayer(size, attention(size.width, whole), epsilon=_EPSILON)
            for attention in self.attentions
        )
        self.norm = nn.RMSNorm(size.width, eps=_EPSILON)

    def forward(
        self,
        x: Tensor,
        own: Visibility,
        cross: Visibility | None = None,
        past: Sequence[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """[B, L, W] to [B, L, W], and what later tokens attend to; ``cross`` is for the layers
        that attend to the past alone."""
        found = []
        turned = [None if seen is None else rotary_angles(seen.positions, self.head_dim)
                  for seen in (own, cross)]  # fmt: skip
        for place, layer in enumerate(self.layers):
            crosses = self.attentions[place] is CrossAttention
            places, seen = turned[crosses], cross if crosses else own
            assert places is not None
            assert seen is not None
            x, kept = layer(x, places, seen.mask, past[place] if past else None)
            if kept is not None:
                found.append(kept)
        return self.norm(x), found


class SmolVLANetwork(nn.Module):
    """The graph of SmolVLA."""

    def __init__(self, size: SmolVLASize) -> None:
        super().__init__()
        width = size.expert.width
        self.size = size
        self.vision = ShuffledVision(size)
        self.language = Llama(size.language, size, vocabulary=size.vocabulary)
        self.expert = Llama(size.expert, size, every=size.every)
        self.state_proj = nn.Linear(size.state_dim, size.language.width)
        self.action_in_proj = nn.Linear(size.action_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, size.action_dim)

    def prefix(
        self, pixels: Tensor, pixel_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """Read pictures [B, n, 3, S, S], those of ``pixel_mask`` [B, n], tokens [B, L], and the
        state [B, D], which pictures and text do not see."""
        rows, cameras = pixels.shape[:2]
        seen = self.vision(pixels.flatten(0, 1)).unflatten(0, (rows, cameras))
        there = pixel_mask.repeat_interleave(seen.shape[2], dim=1)
        text = self.language.embed_tokens(tokens)
        told = self.state_proj(state.to(text.dtype))[:, None]
        scale = math.sqrt(text.shape[-1])
        x = torch.cat([seen.flatten(1, 2) * scale, text * scale, told], dim=1)
        mask = torch.cat([there, token_mask, torch.ones_like(token_mask[:, :1])], dim=1)
        sees = mask[:, None, None].repeat(1, 1, mask.shape[1], 1)
        sees[:, :, :-1, -1] = False
        hidden, past = self.language(x, Visibility(mask.long().cumsum(1) - 1, sees))
        return Prefix(past, mask, hidden)

    def denoise(self, prefix: Prefix, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] of noisy actions [B, H, A] at time [B] (1 noise, 0 action), float32.

        An action sees those before it. The second result is the expert's hidden state [B, H, W].
        """
        dtype = self.action_in_proj.weight.dtype
        x = self.action_in_proj(noisy.to(dtype))
        told = sinusoids(time, x.shape[-1]).to(dtype)[:, None].expand_as(x)
        inner = functional.silu(self.action_time_mlp_in(torch.cat([x, told], dim=-1)))
        x = self.action_time_mlp_out(inner)
        rows, length = x.shape[:2]
        read = prefix.mask[:, None, None].expand(-1, 1, length, -1)
        before = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        steps = torch.arange(length, device=x.device).expand(rows, -1)
        own = Visibility(
            prefix.mask.long().sum(1, keepdim=True) + steps,
            torch.cat([read, before.expand(rows, 1, -1, -1)], dim=-1),
        )
        hidden, _ = self.expert(x, own, Visibility(steps, read), prefix.past)
        return self.action_out_proj(hidden).float(), hidden
