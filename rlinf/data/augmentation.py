"""Pictures that vary each time they are learnt from: crops and colours, drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.envs.observation_names import age, present

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Generator, Tensor

Range = tuple[float, float]


class AugmentationConfig(StrictModel):
    """Ranges that are drawn from, anew for each picture of each batch; [1, 1] leaves it alone."""

    crop: Range = (1.0, 1.0)
    """Side of a crop, as a part of that of the picture, to whose size it is enlarged again."""
    brightness: Range = (1.0, 1.0)
    """Factor of all values."""
    contrast: Range = (1.0, 1.0)
    """Factor of the distance from the mean grey of the picture."""
    saturation: Range = (1.0, 1.0)
    """Factor of the distance from the grey of each pixel."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for name in type(self).model_fields:
            low, high = getattr(self, name)
            most = 1.0 if name == "crop" else float("inf")
            if not 0 < low <= high <= most:
                hint = "two rising numbers above 0" + (", at most 1" if name == "crop" else "")
                raise illegal(name, f"is [{low:g}, {high:g}]", hint=hint)
        return self

    def applied(self, inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Inputs [N, ...] in which pictures (uint8) vary; the same for the same seed.

        What is drawn for a row does not depend on how a batch is divided afterwards, and is the
        same for successive steps.
        """
        import torch

        generator, found = torch.Generator().manual_seed(seed), dict(inputs)
        drawn: dict[str, Tensor] = {}
        for name in sorted(inputs, key=lambda name: (present(name), age(name))):
            if inputs[name].dtype == torch.uint8 and inputs[name].dim() >= 4:
                if age(name):
                    generator.set_state(drawn[present(name)])
                drawn[name] = generator.get_state()
                found[name] = self._varied(inputs[name], generator)
        return found

    def _varied(self, pictures: Tensor, generator: Generator) -> Tensor:
        """[N, H, W, 3] or [N, n, H, W, 3] uint8."""
        import torch

        flat = pictures.flatten(0, -4).permute(0, 3, 1, 2).float() / 255
        count = len(flat)

        def drawn(bounds: Range) -> Tensor:
            low, high = bounds
            return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator)

        side, place = drawn(self.crop), torch.rand(count, 2, generator=generator)
        if self.crop != (1.0, 1.0):
            side = side.reshape(count, 1)
            theta = torch.zeros(count, 2, 3)
            theta[:, 0, 0] = theta[:, 1, 1] = side[:, 0]
            theta[:, :, 2] = (2 * place - 1) * (1 - side)
            grid = torch.nn.functional.affine_grid(theta, list(flat.shape), align_corners=False)
            flat = torch.nn.functional.grid_sample(
                flat, grid, padding_mode="border", align_corners=False
            )
        # Weights of ITU-R BT.601.
        weights = torch.tensor([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1)
        flat = (flat * drawn(self.brightness)).clamp(0, 1)
        mean = (flat * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        flat = (mean + (flat - mean) * drawn(self.contrast)).clamp(0, 1)
        grey = (flat * weights).sum(1, keepdim=True)
        flat = (grey + (flat - grey) * drawn(self.saturation)).clamp(0, 1)
        return (flat * 255).round().to(torch.uint8).permute(0, 2, 3, 1).reshape(pictures.shape)
