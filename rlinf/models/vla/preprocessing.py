"""Pictures as vision towers read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def side_by_side(views: Sequence[Tensor]) -> Tensor:
    """Pictures of n views, each [B, 3, H, W], as [B, n, 3, H, W]; a single one is not copied."""
    return views[0].unsqueeze(1) if len(views) == 1 else torch.stack([*views], dim=1)


def colour_planes(images: Tensor) -> Tensor:
    """Pictures [B, H, W, 3] uint8 as [B, 3, H, W] float32, a plane of each colour behind another:
    torch filters these in two thirds of the time that colours side by side take it."""
    return images.permute(0, 3, 1, 2).contiguous().float()


class Standardised(torch.nn.Module):
    """(x / 255 − mean) / deviation of each colour, in one pass.

    Args:
        means: [..., 3].
        deviations: [..., 3].
    """

    scale: Tensor
    """[..., 3, 1, 1] that numbers from 0 to 255 are multiplied by; ``shift`` is added."""
    shift: Tensor

    def __init__(self, means: Sequence[Any], deviations: Sequence[Any]) -> None:
        super().__init__()
        mean, deviation = (
            torch.tensor(given, dtype=torch.float64)[..., None, None]
            for given in (means, deviations)
        )
        self.register_buffer("scale", (1.0 / (255.0 * deviation)).float(), persistent=False)
        self.register_buffer("shift", (-mean / deviation).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 3, H, W] float32."""
        return torch.addcmul(self.shift, x, self.scale)


def _signed(pixels: Tensor) -> Tensor:
    """Numbers from 0 to 255 to [−1, 1], in their place and in one pass over them."""
    return torch.add(pixels.new_full((), -1.0), pixels, alpha=2.0 / 255.0, out=pixels)


def square_pixels(
    images: Tensor, side: int, *, centred: bool = True, filtered: bool = False
) -> Tensor:
    """Pictures [B, H, W, 3] uint8 to [B, 3, side, side] float32 in [−1, 1].

    The longer edge becomes ``side``, bilinear; the rest is black on both sides, or else on the left
    and above.

    Args:
        images: [B, H, W, 3] uint8.
        side: S, in pixels.
        centred: Black on both sides.
        filtered: Filter, and round to whole numbers, as openpi's transforms have pillow do it
            (``image_tools.resize_with_pad``). Its and lerobot's helper of torch does neither.
    """
    height, width = images.shape[1:3]
    pixels = colour_planes(images) if filtered else images.permute(0, 3, 1, 2).to(torch.float32)
    ratio = max(height, width) / side
    size = (int(height / ratio), int(width / ratio))
    if size != (height, width):
        pixels = functional.interpolate(
            pixels, size=size, mode="bilinear", antialias=filtered, align_corners=False
        )
        if filtered:
            pixels.round_()
    pixels = _signed(pixels)
    above, left = side - size[0], side - size[1]
    if centred:
        above, left = above // 2, left // 2
    margins = (left, side - size[1] - left, above, side - size[0] - above)
    return functional.pad(pixels, margins, value=-1.0) if any(margins) else pixels


def cropped_pixels(images: Tensor, side: int, *, share: float) -> Tensor:
    """Pictures [B, H, W, 3] uint8 to [B, 3, side, side] float32 in [−1, 1].

    The middle of each picture, ``share`` of its edges, is stretched, bilinear and filtered, and
    rounded down to whole numbers, as Isaac-GR00T stores what it has scaled.
    """
    height, width = (int(share * edge) for edge in images.shape[1:3])
    above, left = (
        round((edge - kept) / 2)
        for edge, kept in zip(images.shape[1:3], (height, width), strict=True)
    )
    pixels = colour_planes(images[:, above : above + height, left : left + width])
    if (height, width) != (side, side):
        pixels = functional.interpolate(
            pixels, size=(side, side), mode="bilinear", antialias=True, align_corners=False
        ).floor_()
    return _signed(pixels)


def resized_pixels(images: Tensor, side: int, *, multiple: int) -> Tensor:
    """Pictures [B, H, W, 3] uint8 to [B, 3, H', W'] float32 in [0, 1].

    The longer edge becomes ``side``; then each the nearest multiple. Both steps are bicubic and
    rounded to whole numbers, as wall-x does them.
    """
    height, width = images.shape[1:3]
    longer = max(height, width)
    first = (int(side * height / longer), int(side * width / longer))
    last = tuple(max(multiple, round(edge / multiple) * multiple) for edge in first)
    pixels = colour_planes(images)
    for size in (first, last):
        if tuple(pixels.shape[-2:]) != size:
            pixels = functional.interpolate(
                pixels, size=size, mode="bicubic", antialias=True, align_corners=False
            )
            pixels = pixels.round_().clamp_(0, 255)
    return pixels.div_(255.0)
