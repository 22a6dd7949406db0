"""Network of the diffusion policy (Chi et al. 2023, arXiv 2303.04137): encoders and a U-Net.

An encoder of each view gives a few key points of a picture. These and the state are the condition
under which a U-Net over the time of a chunk tells noise from actions, by FiLM (Perez et al. 2017).
Parts have the names of lerobot's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.visuomotor.resnet import ResNet, ResNetSize

_BASE = 10_000.0


@dataclass(frozen=True)
class DiffusionSize:
    """Sizes of the network; the defaults are those of lerobot for pictures of 96 × 96.

    Args:
        backbone: Of the ResNet of an encoder.
        views: How many pictures there are.
        encoders: 1 for all of them, or as many.
        picture: Height and width of what an encoder sees.
        resized: Height and width to which a picture is brought first; None: it stays.
        cropped: Whether ``picture`` is cut out of it, the middle where nothing is said.
        key_points: Of a picture.
        history: Observations that the condition has, one behind the other.
        horizon: H.
        action_dim: A'.
        state_dim: D; 0: none are read.
        channels: Of each level of the U-Net, which halves the time of the one before.
        kernel: Width of its convolutions.
        groups: Of its norms.
        step_width: Width of what says how much noise there is.
        scales: Whether the condition scales channels as well as it shifts them.
    """

    backbone: ResNetSize = field(default_factory=lambda: ResNetSize(norm="group"))
    views: int = 1
    encoders: int = 1
    picture: tuple[int, int] = (96, 96)
    resized: tuple[int, int] | None = None
    cropped: bool = False
    key_points: int = 32
    history: int = 1
    horizon: int = 16
    action_dim: int = 2
    state_dim: int = 2
    channels: tuple[int, ...] = (512, 1024, 2048)
    kernel: int = 5
    groups: int = 8
    step_width: int = 128
    scales: bool = True

    @property
    def condition(self) -> int:
        """Width of the condition."""
        return self.history * (self.state_dim + self.views * 2 * self.key_points)


class DiffusionNetwork(nn.Module):
    """Observations to a condition, and under it noisy actions to what they are made of."""

    def __init__(self, size: DiffusionSize) -> None:
        super().__init__()
        self.size = size
        self.rgb_encoder = nn.ModuleList(_Encoder(size) for _ in range(size.encoders))
        self.unet = _UNet(size)

    def layers(self) -> Iterator[nn.Module]:
        """All that is repeated."""
        for encoder in self.rgb_encoder:
            yield from cast(_Encoder, encoder).backbone.blocks()
        yield from (part for part in self.unet.modules() if isinstance(part, _Residual))

    def features(
        self, pictures: Sequence[Tensor], states: Tensor, corner: Tensor | None = None
    ) -> Tensor:
        """[B, condition / history] float32, what one step adds to the condition.

        Args:
            pictures: Of each view [B, 3, height, width], normalised.
            states: [B, D].
            corner: [B, 2] in [0, 1), where the upper left corner of what is cut out lies between
                its least and its greatest place; None: the middle is taken.
        """
        size, found = self.size, [states.float()]
        for number, picture in enumerate(pictures):
            encoder = self.rgb_encoder[number if size.encoders > 1 else 0]
            found.append(encoder(self._cut(picture, corner)).float())
        return torch.cat(found, dim=-1)

    def denoise(self, condition: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """[B, H, A'] float32 from noisy actions [B, H, A'] at times [B]."""
        found: Tensor = self.unet(x, time, condition)
        return found.float()

    def _cut(self, picture: Tensor, corner: Tensor | None) -> Tensor:
        size = self.size
        if size.resized is not None:
            picture = functional.interpolate(
                picture, size=size.resized, mode="bilinear", antialias=True
            )
        if not size.cropped:
            return picture
        rest = [whole - part for whole, part in zip(picture.shape[-2:], size.picture, strict=True)]
        height, width = size.picture
        if corner is None:
            top, left = (round(each / 2) for each in rest)
            return picture[:, :, top : top + height, left : left + width]
        tops, lefts = (
            (corner[:, axis] * (each + 1)).long()[:, None] + torch.arange(part).to(corner.device)
            for axis, (each, part) in enumerate(zip(rest, size.picture, strict=True))
        )
        rows = torch.arange(len(picture), device=picture.device)[:, None, None]
        found = picture.permute(0, 2, 3, 1)[rows, tops[:, :, None], lefts[:, None]]
        return found.permute(0, 3, 1, 2)


class _Encoder(nn.Module):
    """Pictures [B, 3, height, width] to [B, 2 · key points], by where each channel is largest: a
    spatial softmax (Finn et al. 2015)."""

    def __init__(self, size: DiffusionSize) -> None:
        super().__init__()
        self.backbone = ResNet(size.backbone)
        self.pool = nn.ModuleDict(
            {"nets": nn.Conv2d(size.backbone.channels[-1], size.key_points, 1)}
        )
        self.out = nn.Linear(2 * size.key_points, 2 * size.key_points)

    def forward(self, pictures: Tensor) -> Tensor:
        features: Tensor = self.pool["nets"](self.backbone(pictures))
        share = features.float().flatten(2).softmax(dim=-1).view(features.shape)
        down, right = (
            (share.sum(dim=other) * _line(share.shape[axis], share)).sum(dim=-1)
            for axis, other in ((2, 3), (3, 2))
        )
        points = torch.stack([right, down], dim=-1).flatten(1)
        found: Tensor = self.out(points.to(features.dtype))
        return found.relu()


def _line(count: int, like: Tensor) -> Tensor:
    """Places from −1 to 1."""
    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64).to(like)


class _UNet(nn.Module):
    def __init__(self, size: DiffusionSize) -> None:
        super().__init__()
        width, channels = size.step_width, size.channels
        self.step_width = width
        self.diffusion_step_encoder = nn.ModuleDict(
            {"1": nn.Linear(width, 4 * width), "3": nn.Linear(4 * width, width)}
        )
        self.down_modules = nn.ModuleList()
        for number, (before, count) in enumerate(pairwise((size.action_dim, *channels))):
            parts: list[nn.Module] = [_Residual(size, before, count), _Residual(size, count, count)]
            if number < len(channels) - 1:
                parts.append(nn.Conv1d(count, count, 3, 2, 1))
            self.down_modules.append(nn.ModuleList(parts))
        last = channels[-1]
        self.mid_modules = nn.ModuleList(_Residual(size, last, last) for _ in range(2))
        self.up_modules = nn.ModuleList(
            nn.ModuleList(
                [
                    _Residual(size, 2 * before, count),  # with what the way down had here
                    _Residual(size, count, count),
                    nn.ConvTranspose1d(count, count, 4, 2, 1),
                ]
            )
            for before, count in pairwise(reversed(channels))
        )
        self.final_conv = nn.Sequential(
            # lerobot leaves the groups of this one at their default.
            _ConvBlock(channels[0], channels[0], kernel=size.kernel, groups=8),
            nn.Conv1d(channels[0], size.action_dim, 1),
        )

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        wider, step = self.diffusion_step_encoder.values()
        dtype = next(self.parameters()).dtype
        noisy = step(functional.mish(wider(_waves(time, self.step_width).to(dtype))))
        told = torch.cat([noisy, condition.to(dtype)], dim=-1)
        told = functional.mish(told)
        x, kept = x.to(dtype).transpose(1, 2), list[Tensor]()
        for first, second, *smaller in cast(Sequence[Sequence[nn.Module]], self.down_modules):
            x = second(first(x, told), told)
            kept.append(x)
            x = smaller[0](x) if smaller else x
        for middle in self.mid_modules:
            x = middle(x, told)
        for first, second, larger in cast(Sequence[Sequence[nn.Module]], self.up_modules):
            x = larger(second(first(torch.cat([x, kept.pop()], dim=1), told), told))
        found: Tensor = self.final_conv(x).transpose(1, 2)
        return found


def _waves(time: Tensor, width: int) -> Tensor:
    """Times [B] to sines, then cosines, [B, width] (Vaswani et al. 2017)."""
    half = width // 2
    rates = torch.exp(torch.arange(half) * -(math.log(_BASE) / (half - 1)))
    angles = time[:, None] * rates.to(time.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _ConvBlock(nn.Module):
    def __init__(self, before: int, count: int, *, kernel: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(before, count, kernel, padding=kernel // 2),
            nn.GroupNorm(groups, count),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(x)
        return found


class _Residual(nn.Module):
    """[B, channels, time] to the same with other channels, under a condition [B, width]."""

    def __init__(self, size: DiffusionSize, before: int, count: int) -> None:
        super().__init__()
        self.scales = size.scales
        self.conv1 = _ConvBlock(before, count, kernel=size.kernel, groups=size.groups)
        told = size.step_width + size.condition
        # The non-linearity that lerobot has here is the same in all blocks, and computed once.
        self.cond_encoder = nn.ModuleDict(
            {"1": nn.Linear(told, 2 * count if size.scales else count)}
        )
        self.conv2 = _ConvBlock(count, count, kernel=size.kernel, groups=size.groups)
        self.residual_conv = nn.Conv1d(before, count, 1) if before != count else nn.Identity()

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        shift = self.cond_encoder["1"](told).unsqueeze(-1)
        found = self.conv1(x)
        if self.scales:
            scale, shift = shift.chunk(2, dim=1)
            found = scale * found
        found = self.conv2(found + shift) + self.residual_conv(x)
        return cast(Tensor, found)
