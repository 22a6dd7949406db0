"""The graph of GR00T N1.5: Eagle reads pictures and text, a diffusion transformer denoises actions.

https://arxiv.org/abs/2503.14734 and github.com/NVIDIA/Isaac-GR00T. Eagle is SigLIP, whose patches
take the places of tokens, and the first layers of a Qwen3. What its last layer says of each token
is looked over by a transformer of the head; state and actions are read and written by matrices of
each embodiment. The names of weights in published files are in
:mod:`rlinf.models.vla.gr00t.layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import RotaryAttention, causal_mask, rotary_angles
from rlinf.models.vla.gr00t.transformer import DiffusionTransformer, SelfAttention, time_waves
from rlinf.models.vla.transformer import FlowSize, LlamaLayer, Prefix, TransformerSize, Vision

_EPSILON = 1e-6
_ROTARY_BASE = 1_000_000.0
_UNROUNDED = 1e-3


@dataclass(frozen=True, kw_only=True)
class GR00TSize(FlowSize):
    """What the shapes of all weights follow from; the defaults are those of the published model.

    Args:
        vision: SigLIP So400m.
        language: The first 12 of the 28 layers of Qwen3-1.7B.
        look: Of the transformer that looks over what was read.
        expert: Of the diffusion transformer.
        look_heads: Heads of ``look``.
        expert_heads: Heads of ``expert``.
        hidden: Width of what the diffusion transformer says, and of perceptrons of embodiments.
        embodiments: How many have matrices of their own.
        future: Learned tokens beside state and actions.
        places: Actions that can be told apart.
        buckets: Times that can be told apart.
        picture_token: Token in whose place a patch is read.
    """

    vision: TransformerSize = TransformerSize(1152, 27, 4304)
    language: TransformerSize = TransformerSize(2048, 12, 6144)
    look: TransformerSize = TransformerSize(2048, 4, 8192)
    expert: TransformerSize = TransformerSize(1536, 16, 6144)
    vision_heads: int = 16
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    look_heads: int = 32
    expert_heads: int = 32
    hidden: int = 1024
    embodiments: int = 32
    future: int = 32
    places: int = 1024
    buckets: int = 1000
    picture_token: int = 151669
    vocabulary: int = 151680
    patch: int = 14
    image: int = 224
    horizon: int = 16
    action_dim: int = 32
    state_dim: int = 64

    @property
    def patches(self) -> int:
        """Tokens of a picture."""
        return (self.image // self.patch) ** 2


class Qwen(nn.Module):
    """The first layers of a Qwen3, and the norm behind its last."""

    def __init__(self, size: GR00TSize) -> None:
        super().__init__()
        width = size.language.width
        self.head_dim = size.head_dim
        self.embed_tokens = nn.Embedding(size.vocabulary, width)
        self.layers = nn.ModuleList(
            LlamaLayer(size.language, RotaryAttention(width, size, normed=True), epsilon=_EPSILON)
            for _ in range(size.language.depth)
        )
        self.norm = nn.RMSNorm(width, eps=_EPSILON)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """[B, L, W] of ``there`` [B, L] to [B, L, W]; a token sees those before it."""
        mask = causal_mask(there)
        rotary = rotary_angles(there.long().cumsum(1) - 1, self.head_dim, _ROTARY_BASE)
        for layer in self.layers:
            x, _ = layer(x, rotary, mask, None)
        out: Tensor = self.norm(x)
        return out


class EmbodimentLinear(nn.Module):
    """A linear layer of which each embodiment has its own, W [E, in, out] and b [E, out]."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(embodiments, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """[B, L, in] to [B, L, out] of one embodiment."""
        return functional.linear(x, self.W[embodiment].T, self.b[embodiment])


class EmbodimentPerceptron(nn.Module):
    """Two layers with ReLU between them."""

    def __init__(self, embodiments: int, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, inner)
        self.layer2 = EmbodimentLinear(embodiments, inner, outputs)

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """[B, L, in] to [B, L, out]."""
        out: Tensor = self.layer2(torch.relu(self.layer1(x, embodiment)), embodiment)
        return out


class ActionEncoder(nn.Module):
    """Noisy actions and the denoising time as tokens."""

    def __init__(self, embodiments: int, actions: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, actions, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, embodiment: int) -> Tensor:
        """[B, H, A] at time buckets [B] to [B, H, W]."""
        x = self.W1(actions, embodiment)
        told = time_waves(bucket, x.shape[-1], spread=x.shape[-1] // 2).flatten(-2)
        told = told.to(x.dtype)[:, None].expand_as(x)
        x = functional.silu(self.W2(torch.cat([x, told], dim=-1), embodiment))
        out: Tensor = self.W3(x, embodiment)
        return out


class GR00TNetwork(nn.Module):
    """The graph of GR00T N1.5."""

    def __init__(self, size: GR00TSize) -> None:
        super().__init__()
        read, width = size.language.width, size.expert.width
        self.size = size
        self.vision = Vision(size)
        self.language = Qwen(size)
        self.look_norm = nn.LayerNorm(read)
        self.look = SelfAttention(size.look, size.look_heads)
        self.state_encoder = EmbodimentPerceptron(
            size.embodiments, size.state_dim, size.hidden, width
        )
        self.action_encoder = ActionEncoder(size.embodiments, size.action_dim, width)
        self.position_embedding = nn.Embedding(size.places, width)
        self.future_tokens = nn.Embedding(size.future, width)
        self.expert = DiffusionTransformer(
            size.expert, size.expert_heads, read=read, out=size.hidden
        )
        self.action_decoder = EmbodimentPerceptron(
            size.embodiments, size.hidden, size.hidden, size.action_dim
        )

    def prefix(self, pixels: Tensor, tokens: Tensor, there: Tensor) -> Prefix:
        """Read pictures [B, n, 3, S, S] in the places of picture tokens among [B, L], of which
        those of ``there`` [B, L] are read."""
        seen = self.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
        x = self.language.embed_tokens(tokens)
        places = (tokens == self.size.picture_token).unsqueeze(-1)
        x = x.masked_scatter(places, seen.to(x.dtype))
        return Prefix([], there, self.look(self.look_norm(self.language(x, there)), there))

    def state_token(self, states: Tensor, embodiment: int) -> Tensor:
        """[B, D] to [B, 1, W]."""
        dtype = self.future_tokens.weight.dtype
        found: Tensor = self.state_encoder(states.to(dtype)[:, None], embodiment)
        return found

    def denoise(
        self, prefix: Prefix, states: Tensor, noisy: Tensor, time: Tensor, embodiment: int
    ) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] float32 of noisy actions [B, H, A] at time [B] (0 noise, 1 action),
        with states [B, D]; and hidden states [B, H, W] of the diffusion transformer."""
        told = self.state_token(states, embodiment)
        bucket = (time * self.size.buckets + _UNROUNDED).floor()
        horizon = noisy.shape[1]
        actions = self.action_encoder(noisy.to(told.dtype), bucket, embodiment)
        actions = actions + self.position_embedding.weight[:horizon]
        future = self.future_tokens.weight.expand(len(told), -1, -1)
        x = torch.cat([told, future, actions], dim=1)
        hidden = self.expert(x, bucket, prefix.hidden, prefix.mask)[:, -horizon:].contiguous()
        return self.action_decoder(hidden, embodiment).float(), hidden
