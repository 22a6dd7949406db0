"""Network of ACT, Action Chunking with Transformers (Zhao et al. 2023, arXiv 2304.13705).

A ResNet turns pictures into tokens. A transformer encoder reads these, the state and a latent
vector; a decoder asks it for every action of a chunk at once. In supervised training the latent
comes from the recorded chunk, through an encoder of its own (a conditional variational
autoencoder); otherwise it is 0. Parts have the names of lerobot's files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.attention import BiasedAttention
from rlinf.models.visuomotor.resnet import ResNet, ResNetSize

_BASE = 10_000.0
Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
}


@dataclass(frozen=True)
class ACTSize:
    """Sizes of the network; the defaults are those of the published model for ALOHA.

    Args:
        backbone: Of the ResNet.
        width: D of the tokens.
        mlp: Width of the feed-forward layers.
        heads: Of the attention.
        encoder_layers: Of what reads pictures and state.
        decoder_layers: Of what gives actions.
        latent_layers: Of what reads recorded actions; 0: there is no latent but 0.
        latent: Width of the latent vector.
        horizon: H.
        action_dim: A'.
        state_dim: Of the states; 0: none are read.
        before: Layers are normalised before what they compute, not after it.
        activation: Of the feed-forward layers.
    """

    backbone: ResNetSize = field(default_factory=ResNetSize)
    width: int = 512
    mlp: int = 3200
    heads: int = 8
    encoder_layers: int = 4
    decoder_layers: int = 1
    latent_layers: int = 4
    latent: int = 32
    horizon: int = 100
    action_dim: int = 14
    state_dim: int = 14
    before: bool = False
    activation: Activation = "relu"


class ACTNetwork(nn.Module):
    """From pictures, states and a latent vector to a chunk of actions, in units of the model."""

    def __init__(self, size: ACTSize) -> None:
        super().__init__()
        self.size, width = size, size.width
        if size.latent_layers:
            self.vae_encoder = _Layers(size, size.latent_layers, _EncoderLayer, size.before)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if size.state_dim:
                self.vae_encoder_robot_state_input_proj = nn.Linear(size.state_dim, width)
            self.vae_encoder_action_input_proj = nn.Linear(size.action_dim, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * size.latent)
        self.backbone = ResNet(size.backbone)
        self.encoder = _Layers(size, size.encoder_layers, _EncoderLayer, size.before)
        self.decoder = _Layers(size, size.decoder_layers, _DecoderLayer, True)
        if size.state_dim:
            self.encoder_robot_state_input_proj = nn.Linear(size.state_dim, width)
        self.encoder_latent_input_proj = nn.Linear(size.latent, width)
        self.encoder_img_feat_input_proj = nn.Conv2d(size.backbone.channels[-1], width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(2 if size.state_dim else 1, width)
        self.decoder_pos_embed = nn.Embedding(size.horizon, width)
        self.action_head = nn.Linear(width, size.action_dim)

    @torch.no_grad()
    def begin_without_divergence(self) -> None:
        """Let the latent of recorded actions be standard normal, until more is learnt."""
        if self.size.latent_layers:
            self.vae_encoder_latent_output_proj.weight.zero_()

    def layers(self) -> Iterator[nn.Module]:
        """All that is repeated."""
        parts = (self.vae_encoder,) if self.size.latent_layers else ()
        yield from self.backbone.blocks()
        for part in (*parts, self.encoder, self.decoder):
            yield from part.layers

    def latent_of(self, states: Tensor, actions: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of the latent, both [B, latent] float32.

        Args:
            states: [B, D].
            actions: [B, H, A'].
            recorded: [B, H] bool, which of them are no padding.
        """
        dtype = self.action_head.weight.dtype
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)]
        if self.size.state_dim:
            tokens.append(self.vae_encoder_robot_state_input_proj(states.to(dtype)).unsqueeze(1))
        tokens.append(self.vae_encoder_action_input_proj(actions.to(dtype)))
        x = torch.cat(tokens, dim=1)
        seen = functional.pad(recorded, (x.shape[1] - recorded.shape[1], 0), value=True)
        places = line_positions(x.shape[1], self.size.width, like=x)
        read = self.vae_encoder(x, places=places, seen=seen)[:, 0]
        mean, log_variance = self.vae_encoder_latent_output_proj(read).float().chunk(2, dim=-1)
        return mean, log_variance

    def encode(
        self, pictures: Sequence[Tensor], states: Tensor, latent: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, D] that were read, the latent's first, and their positions [L, D].

        Args:
            pictures: Of each view [B, 3, height, width], normalised.
            states: [B, D].
            latent: [B, latent]; None: 0.
        """
        dtype = self.action_head.weight.dtype
        if latent is None:
            latent = states.new_zeros(len(states), self.size.latent)
        tokens = [self.encoder_latent_input_proj(latent.to(dtype)).unsqueeze(1)]
        places = [self.encoder_1d_feature_pos_embed.weight]
        if self.size.state_dim:
            tokens.append(self.encoder_robot_state_input_proj(states.to(dtype)).unsqueeze(1))
        for found in self._features(pictures):
            height, columns = found.shape[-2:]
            places.append(plane_positions(height, columns, self.size.width, like=found))
            projected = self.encoder_img_feat_input_proj(found)
            tokens.append(projected.flatten(2).transpose(1, 2))
        positions = torch.cat(places)
        return self.encoder(torch.cat(tokens, dim=1), places=positions), positions

    def _features(self, pictures: Sequence[Tensor]) -> Sequence[Tensor]:
        if len({picture.shape for picture in pictures}) > 1:
            return [self.backbone(picture) for picture in pictures]
        found: Tensor = self.backbone(torch.cat(list(pictures)))
        return found.chunk(len(pictures))

    def decode(self, memory: Tensor, positions: Tensor) -> Tensor:
        """Actions [B, H, A'] float32 from what was read."""
        places = self.decoder_pos_embed.weight
        # As all rows begin with nothing, what is the same in each of them is computed once.
        blank = memory.new_zeros(1, *places.shape)
        found = self.decoder(blank, places=places, memory=memory, memory_places=positions)
        return cast(Tensor, self.action_head(found)).float()


class _Layers(nn.Module):
    def __init__(
        self, size: ACTSize, count: int, layer: Callable[[ACTSize], nn.Module], normed: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(size) for _ in range(count))
        self.norm = nn.LayerNorm(size.width) if normed else nn.Identity()

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, **given)
        found: Tensor = self.norm(x)
        return found


class _Layer(nn.Module):
    """Residual parts, each with a norm before it or behind it; without dropout, as a policy draws
    no random numbers."""

    def __init__(self, size: ACTSize, norms: int) -> None:
        super().__init__()
        self.before, self.activation = size.before, _ACTIVATIONS[size.activation]
        self.self_attn = BiasedAttention(size.width, size.heads)
        self.linear1 = nn.Linear(size.width, size.mlp)
        self.linear2 = nn.Linear(size.mlp, size.width)
        for number in range(norms):
            setattr(self, f"norm{number + 1}", nn.LayerNorm(size.width))

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        found: Tensor = x + part(norm(x)) if self.before else norm(x + part(x))
        return found

    def _feed_forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear2(self.activation(self.linear1(x)))
        return found


class _EncoderLayer(_Layer):
    norm1: nn.Module
    norm2: nn.Module

    def __init__(self, size: ACTSize) -> None:
        super().__init__(size, 2)

    def forward(self, x: Tensor, places: Tensor, seen: Tensor | None = None) -> Tensor:
        """[B, L, D] to the same, with positions [L, D]."""

        def attend(y: Tensor) -> Tensor:
            placed = y + places
            found: Tensor = self.self_attn(placed, placed, y, seen)
            return found

        return self._add(self._add(x, self.norm1, attend), self.norm2, self._feed_forward)


class _DecoderLayer(_Layer):
    norm1: nn.Module
    norm2: nn.Module
    norm3: nn.Module

    def __init__(self, size: ACTSize) -> None:
        super().__init__(size, 3)
        self.multihead_attn = BiasedAttention(size.width, size.heads)

    def forward(self, x: Tensor, places: Tensor, memory: Tensor, memory_places: Tensor) -> Tensor:
        """[B or 1, H, D] to [B, H, D], looking at a memory [B, L, D]."""

        def attend(y: Tensor) -> Tensor:
            placed = y + places
            found: Tensor = self.self_attn(placed, placed, y)
            return found

        def look(y: Tensor) -> Tensor:
            found: Tensor = self.multihead_attn(y + places, memory + memory_places, memory)
            return found

        x = self._add(self._add(x, self.norm1, attend), self.norm2, look)
        return self._add(x, self.norm3, self._feed_forward)


def line_positions(count: int, width: int, *, like: Tensor) -> Tensor:
    """[count, width] sines and cosines in turn (Vaswani et al. 2017), of positions from 0."""
    return _waves(torch.arange(count, dtype=torch.float64), width).to(like)


def plane_positions(height: int, columns: int, width: int, *, like: Tensor) -> Tensor:
    """[height · columns, width], row by row: half of the numbers say how far down, the others how
    far right, as parts of 2π (Carion et al. 2020)."""
    found = []
    for count in (height, columns):
        places = torch.arange(1, count + 1, dtype=torch.float32)
        found.append(_waves(places / (count + 1e-6) * (2.0 * math.pi), width // 2))
    down = found[0][:, None].expand(-1, columns, -1)
    right = found[1][None].expand(height, -1, -1)
    return torch.cat([down, right], dim=-1).flatten(0, 1).to(like)


def _waves(places: Tensor, width: int) -> Tensor:
    numbers = torch.arange(0, width, 2, dtype=places.dtype)
    angles = places[:, None] / _BASE ** (numbers / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
