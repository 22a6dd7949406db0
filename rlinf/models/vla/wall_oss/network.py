"""The graph of WALL-OSS: a Qwen2.5-VL whose layers have another perceptron for actions.

https://arxiv.org/abs/2509.11766 and github.com/X-Square-Robot/wall-x. Pictures, text and the state
are a prefix that is read once; noisy actions follow it as tokens of the same sequence, which see
the prefix and each other. Attention and norms are shared, the perceptron goes by the kind of token.
The names of weights in published files are in :mod:`rlinf.models.vla.wall_oss.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.adapters import LowRankLinear
from rlinf.models.attention import KeyValue, RotaryAttention, causal_mask, rotary_angles
from rlinf.models.vla.gr00t.transformer import time_waves
from rlinf.models.vla.transformer import FlowSize, Prefix, TransformerSize
from rlinf.models.vla.wall_oss.vision import Tower

_EPSILON = 1e-6
_ROTARY_BASE = 1_000_000.0
TEXT, ACTIONS = 0, 1


@dataclass(frozen=True, kw_only=True)
class WallSize(FlowSize):
    """What the shapes of all weights follow from; the defaults are those of Qwen2.5-VL-3B.

    Args:
        vision: Its tower.
        language: Its language model.
        expert: Width, layers and inner width of the perceptrons for actions; of a published model
            as its weights say.
        merge: As many by as many patches become one token.
        window: As many by as many tokens see each other in the tower.
        whole: Layers of the tower in which all do.
        sections: Shares of rotary angles that tell time, row and column.
        picture_token: Token in whose place a part of a picture is read.
        state_token: Token in whose place the state is read.
        image: Pixels of the longer edge of a picture, about.
    """

    vision: TransformerSize = TransformerSize(1280, 32, 3420)
    language: TransformerSize = TransformerSize(2048, 36, 11008)
    expert: TransformerSize = TransformerSize(2048, 36, 11008)
    vision_heads: int = 16
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128
    vocabulary: int = 151936
    merge: int = 2
    window: int = 4
    whole: tuple[int, ...] = (7, 15, 23, 31)
    sections: tuple[int, int, int] = (16, 24, 24)
    picture_token: int = 151655
    state_token: int = -1
    patch: int = 14
    image: int = 256
    horizon: int = 32
    action_dim: int = 20
    state_dim: int = 20


@dataclass(frozen=True)
class WallPrefix(Prefix):
    """What has been read, and at which position [B] it goes on."""

    following: Tensor


class GatedPerceptron(nn.Module):
    """The gated one of Qwen."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] to [B, L, W]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RoutedLayer(nn.Module):
    """A layer of Qwen2.5 with a perceptron for text and one for actions."""

    def __init__(self, size: WallSize) -> None:
        super().__init__()
        width = size.language.width
        self.input_layernorm = nn.RMSNorm(width, eps=_EPSILON)
        self.self_attn = RotaryAttention(width, size, bias=True)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=_EPSILON)
        self.experts = nn.ModuleList(
            GatedPerceptron(width, inner) for inner in (size.language.mlp, size.expert.mlp)
        )

    def forward(
        self, x: Tensor, rotary: KeyValue, mask: Tensor, past: KeyValue | None, kind: int
    ) -> tuple[Tensor, KeyValue]:
        """[B, L, W] of one kind of tokens to [B, L, W], and keys and values [B, heads, L, d]."""
        change, own = self.self_attn(self.input_layernorm(x), rotary, mask, past)
        x = x + change
        return x + self.experts[kind](self.post_attention_layernorm(x)), own


class RoutedQwen(nn.Module):
    """Embeddings, layers and a last norm."""

    def __init__(self, size: WallSize) -> None:
        super().__init__()
        self.head_dim, self.sections = size.head_dim, size.sections
        self.embed_tokens = nn.Embedding(size.vocabulary, size.language.width)
        self.layers = nn.ModuleList(RoutedLayer(size) for _ in range(size.language.depth))
        self.norm = nn.RMSNorm(size.language.width, eps=_EPSILON)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[KeyValue] | None = None,
        *,
        kind: int = TEXT,
    ) -> tuple[Tensor, list[KeyValue]]:
        """[B, L, W] at positions [3, B, L] in time, row and column to [B, L, W], and what later
        tokens attend to."""
        each = [rotary_angles(axis, self.head_dim, _ROTARY_BASE) for axis in positions]
        shares = zip(each, self.sections, accumulate(self.sections), strict=True)
        parts = [tuple(of[..., end - share : end] for of in pair) for pair, share, end in shares]
        cosines, sines = (torch.cat(list(of), dim=-1) for of in zip(*parts, strict=True))
        found = []
        for place, layer in enumerate(self.layers):
            x, own = layer(x, (cosines, sines), mask, past[place] if past else None, kind)
            found.append(own)
        return self.norm(x), found


class WallNetwork(nn.Module):
    """The graph of WALL-OSS."""

    def __init__(self, size: WallSize) -> None:
        super().__init__()
        width = size.language.width
        self.size = size
        self.vision = Tower(
            size.vision, heads=size.vision_heads, patch=size.patch, merge=size.merge,
            window=size.window, whole=size.whole, out=width,
        )  # fmt: skip
        self.language = RoutedQwen(size)
        self.state_proj = nn.Linear(2 * size.state_dim, width, bias=False)
        self.action_in = nn.Linear(2 * size.action_dim, width, bias=False)
        self.time_in = nn.Linear(2 * width, width, bias=False)
        self.time_out = nn.Linear(width, width, bias=False)
        self.action_out = nn.Linear(width, size.action_dim, bias=False)

    def prefix(
        self,
        pictures: Sequence[Tensor],
        tokens: Tensor,
        there: Tensor,
        states: Tensor,
        known: Tensor,
    ) -> WallPrefix:
        """Read pictures, each [B, 3, H, W] in [0, 1], and states [B, D], of which ``known`` [D]
        mean something, in the places of their tokens among [B, L] of ``there`` [B, L]."""
        of_pictures = tokens == self.size.picture_token
        x = self.language.embed_tokens(tokens)
        seen = torch.cat([self.vision(picture) for picture in pictures], dim=1).to(x.dtype)
        told = self.state_proj(torch.cat([states, known.expand_as(states)], dim=-1).to(x.dtype))
        x = x.masked_scatter(of_pictures.unsqueeze(-1), seen)
        x = torch.where((tokens == self.size.state_token).unsqueeze(-1), told[:, None], x)
        grids = [self.vision.grid(picture) for picture in pictures]
        positions = grid_positions(of_pictures, grids)
        hidden, past = self.language(x, positions, causal_mask(there))
        following = (positions.amax(0) * there).amax(1) + 1
        return WallPrefix(past, there, hidden, following)

    def denoise(
        self, prefix: Prefix, noisy: Tensor, time: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] float32 of noisy actions [B, H, A], whose dimensions ``moved`` [A]
        mean something, at time [B] (0 noise, 1 action); and hidden states [B, H, W]."""
        assert isinstance(prefix, WallPrefix)
        dtype = self.action_in.weight.dtype
        x = self.action_in(torch.cat([noisy, moved.expand_as(noisy)], dim=-1).to(dtype))
        width = x.shape[-1]
        told = time_waves(time, width, spread=width // 2 - 1).flatten(-2).to(dtype)
        told = told[:, None].expand_as(x)
        x = self.time_out(functional.silu(self.time_in(torch.cat([x, told], dim=-1))))
        length = x.shape[1]
        steps = torch.arange(length, device=x.device)
        positions = (prefix.following[:, None] + steps).expand(3, -1, -1)
        mask = functional.pad(prefix.mask[:, None, None], (0, length), value=True)
        mask = mask.expand(-1, 1, length, -1)
        hidden, _ = self.language(x, positions, mask, prefix.past, kind=ACTIONS)
        velocity = functional.linear(hidden.float(), self.action_out.weight.float())
        if isinstance(self.action_out, LowRankLinear):
            velocity = velocity + self.action_out.update(hidden.float())
        return velocity, hidden


def grid_positions(of_pictures: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Positions [3, B, L] in time, row and column of tokens, of which [B, L] are of pictures.

    Text goes on by 1 in all three. The tokens of a picture share a time, and are at their row and
    column from there; what follows is behind the longer edge of the picture.

    Args:
        of_pictures: [B, L] bool, as many in each row as the grids have places.
        grids: Rows and columns of each picture, in order.
    """
    rows, columns = torch.tensor(grids, device=of_pictures.device).unbind(1)
    ends = (rows * columns).cumsum(0)
    longer = torch.maximum(rows, columns)
    advance = functional.pad(longer.cumsum(0), (1, 0))
    before = of_pictures.cumsum(1) - of_pictures.long()
    done = torch.searchsorted(ends, before, right=True)
    text = (~of_pictures).cumsum(1) - (~of_pictures).long()
    start = text + advance[done]
    which = done.clamp(max=len(grids) - 1)
    inner = before - functional.pad(ends, (1, 0))[which]
    own = torch.stack([torch.zeros_like(inner), inner // columns[which], inner % columns[which]])
    return start + own * of_pictures
