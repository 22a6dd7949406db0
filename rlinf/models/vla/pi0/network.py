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

_EPSILON = 1e-6
_PERIODS = (4e-3, 4.0)
"""Shortest and longest period of the sinusoids that tell the denoising time."""

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TransformerSize:
    """Width, number of layers and inner width of a transformer."""

    width: int
    depth: int
    mlp: int


@dataclass(frozen=True)
class PI0Size:
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

    def __init__(self, size: PI0Size) -> None:
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


class Attention(nn.Module):
    """Attention of Gemma: few heads of keys and values, rotary positions, no biases.

    Of Qwen3, with ``normed``: queries and keys of each head are normalised. Of Qwen2.5, with
    ``bias``: they and the values have biases.
    """

    def __init__(
        self, width: int, size: PI0Size, *, normed: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.q_norm, self.k_norm = (
            nn.RMSNorm(size.head_dim, eps=_EPSILON) if normed else nn.Identity() for _ in range(2)
        )
        self.q_proj = nn.Linear(width, size.heads * size.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, size.kv_heads * size.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, size.kv_heads * size.head_dim, bias=bias)
        self.o_proj = nn.Linear(size.heads * size.head_dim, width, bias=False)

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


class GemmaLayer(nn.Module):
    """A layer of Gemma, of the language model or of the expert."""

    def __init__(self, size: TransformerSize, whole: PI0Size, *, adaptive: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(size.width, adaptive=adaptive)
        self.self_attn = Attention(size.width, whole)
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


def sinusoids(time: Tensor, width: int) -> Tensor:
    """[B] to [B, width]; in float64 where the device has it, as angles go up to 1571."""
    exact = torch.float32 if time.device.type == "mps" else torch.float64
    fraction = torch.linspace(0, 1, width // 2, dtype=exact, device=time.device)
    shortest, longest = _PERIODS
    angles = 2 * math.pi * time[:, None].to(exact) / (shortest * (longest / shortest) ** fraction)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
