"""ResNets of basic blocks (He et al. 2015) without their head, with the names of torchvision.

torchvision itself is not imported: its wheels are tied to one build of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Literal["frozen", "group"]

_EPSILON = 1e-5
_CHANNELS_PER_GROUP = 16  # as the diffusion policy has them


@dataclass(frozen=True)
class ResNetSize:
    """Blocks and channels of each stage; the defaults are those of ResNet18.

    Args:
        blocks: Of two convolutions each, by stage.
        channels: By stage. Each stage but the first halves height and width, after two halvings
            before them.
        norm: Batch norm whose statistics and scales stay as they are, so that no row depends on
            another, or group norm.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    channels: tuple[int, ...] = (64, 128, 256, 512)
    norm: Norm = "frozen"

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the features of a picture."""
        for _ in range(len(self.blocks) + 1):
            height, width = (height + 1) // 2, (width + 1) // 2
        return height, width


class ResNet(nn.Module):
    """Pictures [B, 3, H, W] to features [B, channels[-1], H', W']."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        first = size.channels[0]
        self.stages = len(size.blocks)
        self.conv1 = nn.Conv2d(3, first, 7, 2, 3, bias=False)
        self.bn1 = _norm(size.norm, first)
        for number, (count, channels) in enumerate(zip(size.blocks, size.channels, strict=True)):
            before = first if number == 0 else size.channels[number - 1]
            stride = 1 if number == 0 else 2
            blocks = [_Block(before, channels, stride, size.norm)]
            blocks += [_Block(channels, channels, 1, size.norm) for _ in range(count - 1)]
            setattr(self, f"layer{number + 1}", nn.ModuleList(blocks))

    def blocks(self) -> Iterator[nn.Module]:
        """Blocks of all stages, the first ones first."""
        for number in range(self.stages):
            yield from cast(Sequence[nn.Module], getattr(self, f"layer{number + 1}"))

    def forward(self, pictures: Tensor) -> Tensor:
        """See the class."""
        x = _normed(self.conv1, self.bn1, pictures.to(self.conv1.weight.dtype))
        x = functional.max_pool2d(x.relu_(), 3, 2, 1)
        for block in self.blocks():
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.bn1 = _norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = _norm(norm, channels)
        self.downsample: nn.ModuleList | None = None
        if stride != 1 or before != channels:
            shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.downsample = nn.ModuleList([shortcut, _norm(norm, channels)])

    def forward(self, x: Tensor) -> Tensor:
        found = _normed(self.conv1, self.bn1, x).relu_()
        found = _normed(self.conv2, self.bn2, found)
        if self.downsample is not None:
            shortcut, norm = self.downsample
            x = _normed(cast(nn.Conv2d, shortcut), norm, x)
        return (found + x).relu_()


class FrozenBatchNorm(nn.Module):
    """Batch norm that is a fixed scale and shift of each channel; nothing of it is trained."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))
        self.reset()

    def reset(self) -> None:
        """Let it change nothing."""
        for name in ("weight", "running_var"):
            getattr(self, name).fill_(1.0)
        for name in ("bias", "running_mean"):
            getattr(self, name).zero_()

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Both [channels]."""
        scale = self.weight * (self.running_var + _EPSILON).rsqrt()
        return scale, self.bias - self.running_mean * scale


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "frozen":
        return FrozenBatchNorm(channels)
    return nn.GroupNorm(max(channels // _CHANNELS_PER_GROUP, 1), channels)


def _normed(convolution: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
    """A convolution and its norm; a frozen one is folded into the kernel, which is far smaller than
    what it would have to be applied to."""
    if not isinstance(norm, FrozenBatchNorm):
        return cast(Tensor, norm(convolution(x)))
    scale, shift = norm.scale_and_shift()
    kernel = convolution.weight
    folded = kernel * scale.to(kernel.dtype).view(-1, 1, 1, 1)
    return functional.conv2d(
        x, folded, shift.to(kernel.dtype), convolution.stride, convolution.padding
    )
