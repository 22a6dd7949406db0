from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rlinf.models.vla.preprocessing import square_pixels


def pictures(height: int, width: int, rows: int = 2) -> Tensor:
    return torch.randint(
        0, 256, (rows, height, width, 3), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("height", "width", "inside"),
    [(48, 64, (7, 49, 0, 56)), (64, 32, (0, 56, 14, 42)), (20, 20, (0, 56, 0, 56))],
)
def test_resized_and_padded(height: int, width: int, inside: tuple[int, ...]) -> None:
    found = square_pixels(pictures(height, width), 56)
    top, bottom, left, right = inside
    resized = functional.interpolate(
        pictures(height, width).permute(0, 3, 1, 2).float(),
        size=(bottom - top, right - left),
        mode="bilinear",
    )
    assert found.shape == (2, 3, 56, 56)
    torch.testing.assert_close(found[:, :, top:bottom, left:right], resized / 127.5 - 1)
    border = torch.ones(56, 56, dtype=torch.bool)
    border[top:bottom, left:right] = False
    assert bool((found[:, :, border] == -1).all())


@pytest.mark.parametrize(("height", "width"), [(256, 256), (100, 160), (64, 40), (30, 20)])
def test_filtered_as_pillow_does_it(height: int, width: int) -> None:
    """Within a step of 255: pillow rounds after each of two passes."""
    images = pictures(height, width)
    found = ((square_pixels(images, 56, filtered=True) + 1) * 127.5).permute(0, 2, 3, 1)
    torch.testing.assert_close(found, found.round(), atol=1e-4, rtol=0)
    size = (int(width * 56 / max(height, width)), int(height * 56 / max(height, width)))
    wanted = np.zeros((len(images), 56, 56, 3), np.float32)
    left, above = ((56 - edge) // 2 for edge in size)
    for place, picture in enumerate(images):
        resized = Image.fromarray(picture.numpy()).resize(size, Image.Resampling.BILINEAR)
        wanted[place, above : above + size[1], left : left + size[0]] = np.asarray(resized)
    torch.testing.assert_close(found, torch.from_numpy(wanted), atol=1.01, rtol=0)
    assert (found - torch.from_numpy(wanted)).abs().mean() < 0.3


@pytest.mark.parametrize("filtered", [False, True])
def test_a_picture_that_fits_is_only_scaled(filtered: bool) -> None:
    images = pictures(56, 56)
    images[0, 0, 0], images[0, 0, 1] = 0, 255
    found = square_pixels(images, 56, filtered=filtered)
    assert (found.min(), found.max()) == (-1, pytest.approx(1, abs=1e-6))
    torch.testing.assert_close((found + 1) * 127.5, images.permute(0, 3, 1, 2).float())


@pytest.mark.slow
def test_as_fast_as_the_resize_of_torch() -> None:
    images = pictures(256, 256, rows=16)

    def plain() -> Tensor:
        return functional.interpolate(
            images.permute(0, 3, 1, 2).float(), size=(224, 224), mode="bilinear"
        )

    ours, theirs = best(lambda: square_pixels(images, 224), plain)
    assert ours < 1.2 * theirs


def best(*functions: Callable[[], Tensor]) -> list[float]:
    """Least CPU seconds of each; they take turns, as what else runs on the machine changes."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(30):
        for function, seconds in zip(functions, taken, strict=True):
            began = time.process_time()
            function()
            seconds.append(time.process_time() - began)
    return [min(seconds) for seconds in taken]
