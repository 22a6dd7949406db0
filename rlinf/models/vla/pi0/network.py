"""The graphs of π₀ and π₀.₅: SigLIP and Gemma read images and text, an expert denoises actions.

π₀: https://arxiv.org/abs/2410.24164, π₀.₅: https://arxiv.org/abs/2504.16054. Pictures and text are
a prefix whose keys and values are computed once; the expert attends to them in each denoising step.
The names of weights in published files are in :mod:`rlinf.models.vla.pi0.layouts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import KeyValue, RotaryAttention, rotary_angles
from rlinf.models.vla.transformer import FlowSize, Prefix, TransformerSize, Vision, sinusoids

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class PI0Size(FlowSize):
    """What the shapes of all weights follow from; the defaults are those of the published models.

    Args:
        adaptive: π₀.₅: the time scales and shifts the norms of the expert, and the state is text.
        vision: SigLIP So400m.
        language: Gemma 2B.
        expert: The action expert; as many layers as ``language``.
        horizon: H, actions that are denoised together.
        action_dim: A, padded.
        state_dim: D, padded; read by π₀ alone.
    """

    adaptive: bool = False
    vision: TransformerSize = TransformerSize(1152, 27, 4304)
    language: TransformerSize = TransformerSize(2048, 18, 16384)
    expert: TransformerSize = TransformerSize(1024, 18, 4096)
    vision_heads: int = 16
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    vocabulary: int = 257152
    patch: int = 14
    image: int = 224
    horizon: int = 50
    action_dim: int = 32
    state_dim: int = 32


class Norm(nn.Module):
    """Root-mean-square norm; with a condition, adaptive (adaRMS), with a gate for the residual."""

    def __init__(self, width: int, *, adaptive: bool) -> None:
        super().__init__()
        self.adaptive = adaptive
        if adaptive:
            self.dense = nn.Linear(width, 3 * width)
        else:
            self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B, L, W] normalised, and the gate [B, 1, W] where there is a condition [B, W]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)
        if not self.adaptive:
            return (normed * (1.0 + self.weight.float())).to(x.dtype), None
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        return (normed * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


def _added(x: Tensor, change: Tensor, gate: Tensor | None) -> Tensor:
    return x + change if gate is None else x + change * gate


class GemmaLayer(nn.Module):
    """A layer of Gemma, of the language model or of the expert."""

    def __init__(self, size: TransformerSize, whole: PI0Size, *, adaptive: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(size.width, adaptive=adaptive)
        self.self_attn = RotaryAttention(size.width, whole)
        self.post_attention_layernorm = Norm(size.width, adaptive=adaptive)
        self.gate_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.down_proj = nn.Linear(size.mlp, size.width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: KeyValue,
        mask: Tensor,
        past: KeyValue | None,
        condition: Tensor | None,
    ) -> tuple[Tensor, KeyValue]:
        """[B, L, W] to [B, L, W], and keys and values [B, heads, L, d]."""
        normed, gate = self.input_layernorm(x, condition)
        change, own = self.self_attn(normed, rotary, mask, past)
        x = _added(x, change, gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        inner = functional.gelu(self.gate_proj(normed), approximate="tanh") * self.up_proj(normed)
        return _added(x, self.down_proj(inner), gate), own


class Gemma(nn.Module):
    """Layers and a last norm; the language model has embeddings as well."""

    def __init__(
        self, size: TransformerSize, whole: PI0Size, *, adaptive: bool, vocabulary: int = 0
    ) -> None:
        super().__init__()
        self.head_dim = whole.head_dim
        if vocabulary:
            self.embed_tokens = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(
            GemmaLayer(size, whole, adaptive=adaptive) for _ in range(size.depth)
        )
        self.norm = Norm(size.width, adaptive=adaptive)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: list[KeyValue] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """[B, L, W] at positions [B, L] to [B, L, W], and what later tokens attend to."""
        rotary, found = rotary_angles(positions, self.head_dim), []
        for place, layer in enumerate(self.layers):
            x, own = layer(x, rotary, mask, past[place] if past else None, condition)
            found.append(own)
        return self.norm(x, condition)[0], found


class PI0Network(nn.Module):
    """The graph of π₀, or, with ``size.adaptive``, of π₀.₅."""

    def __init__(self, size: PI0Size) -> None:
        super().__init__()
        width = size.expert.width
        self.size = size
        self.vision = Vision(size)
        self.language = Gemma(size.language, size, adaptive=False, vocabulary=size.vocabulary)
        self.expert = Gemma(size.expert, size, adaptive=size.adaptive)
        self.action_in_proj = nn.Linear(size.action_dim, width)
        if size.adaptive:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(size.state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, size.action_dim)

    def prefix(
        self, pixels: Tensor, pixel_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> Prefix:
        """Read pictures [B, n, 3, S, S], those of ``pixel_mask`` [B, n], and tokens [B, L]."""
        rows, cameras = pixels.shape[:2]
        seen = self.vision(pixels.flatten(0, 1)).unflatten(0, (rows, cameras))
        patches = seen.shape[2]
        embedding = self.language.embed_tokens
        text = embedding(tokens) * math.sqrt(embedding.embedding_dim)
        mask = torch.cat([pixel_mask.repeat_interleave(patches, dim=1), token_mask], dim=1)
        x = torch.cat([seen.flatten(1, 2), text], dim=1)
        positions = mask.long().cumsum(1) - 1
        hidden, past = self.language(x, positions, mask[:, None, None])
        return Prefix(past, mask, hidden)

    def denoise(
        self, prefix: Prefix, noisy: Tensor, time: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] of noisy actions [B, H, A] at time [B] (1 noise, 0 action), float32.

        π₀ reads the state [B, D]. The second result is the expert's hidden state [B, H, W].
        """
        dtype = self.action_in_proj.weight.dtype
        x = self.action_in_proj(noisy.to(dtype))
        told = sinusoids(time, x.shape[-1]).to(dtype)
        condition = None
        seen = prefix.mask[:, None, None]
        if self.size.adaptive:
            inner = functional.silu(self.time_mlp_in(told))
            condition = functional.silu(self.time_mlp_out(inner))
            mask = functional.pad(seen, (0, x.shape[1]), value=True)
        else:
            assert state is not None
            told = told[:, None].expand_as(x)
            inner = functional.silu(self.action_time_mlp_in(torch.cat([x, told], dim=-1)))
            x = self.action_time_mlp_out(inner)
            x = torch.cat([self.state_proj(state.to(dtype))[:, None], x], dim=1)
            length = x.shape[1]
            own = torch.ones(length, length, dtype=torch.bool, device=x.device)
            own[0, 1:] = False  # the state sees no action
            rows = (len(x), 1, length, -1)
            mask = torch.cat([seen.expand(rows), own.expand(len(x), 1, -1, -1)], dim=-1)
        first = prefix.mask.long().sum(1, keepdim=True)
        positions = first + torch.arange(x.shape[1], device=x.device)
        hidden, _ = self.expert(x, positions, mask, prefix.past, condition)
        hidden = hidden[:, -noisy.shape[1] :].contiguous()
        return self.action_out_proj(hidden).float(), hidden
