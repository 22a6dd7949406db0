"""Qwen2.5-VL and Qwen3-VL as policies: each action dimension is a token behind the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.models.vision_language import attended_layers, vision_of
from rlinf.models.vla.action_tokens import ActionTokens
from rlinf.models.vla.instructions import InstructionTable, refuse_unknown
from rlinf.models.vla.preprocessing import Standardised, colour_planes
from rlinf.models.vla.qwen_vl.config import QwenVLConfig
from rlinf.models.vla.qwen_vl.files import (
    BINS,
    PictureSettings,
    published_parts,
    question,
    tiny_parts,
)
from rlinf.models.vla.qwen_vl.network import QwenVLNetwork
from rlinf.models.vla.token_policy import OneByOne

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class QwenVLPolicy(OneByOne):
    """Pictures, an instruction, and one token after another for each action dimension."""

    network: QwenVLNetwork
    _config: QwenVLConfig

    def __init__(
        self, config: QwenVLConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        if config.path is None:
            parts = tiny_parts(config, seed=seed)
        else:
            parts = published_parts(config, config.path)
        shapes = [env_spec.observation_shapes[key] for key, _ in self.views]
        sizes = [
            parts.settings.squares(shape[-3], shape[-2], config.max_image_tokens)
            for shape in shapes
        ]
        beginning, pictures = parts.laid_out(sizes)
        self.patches = torch.nn.ModuleList(_Patches(parts.settings, *size) for size in sizes)
        self.instructions = InstructionTable(
            encode=parts.encode,
            **self.prompts_of(question),
            limit=config.max_prompt_tokens,
            side="left",
        )
        # What is small, and may be refused, goes before the weights.
        model = parts.read()
        self.network = QwenVLNetwork(
            model, beginning, pictures, merge=parts.settings.merge, bins=BINS
        )
        vocabulary = int(model.config.get_text_config().vocab_size)
        self.tokens = ActionTokens(vocabulary, BINS)
        refuse_unknown(self.instructions, vocabulary)
        if config.freeze_vision:
            self.vision.requires_grad_(False)
        self.add_values(config, self.network.width, seed=seed)

    @property
    def vision(self) -> torch.nn.Module:
        """See :attr:`TokenPolicy.vision`."""
        found = vision_of(self.network.model)
        assert found is not None
        return found

    def repeated_layers(self) -> list[torch.nn.Module]:
        """Layers of the language part, and those that read pictures."""
        return attended_layers(self.network.model)

    def _embedded(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        shown = zip(self.patches, self.pictures_of(inputs), strict=True)
        parts = [cut(each) for cut, each in shown]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self.network.prompt(pixels, *self.instructions(inputs))


class _Patches(torch.nn.Module):
    """Pictures [B, H, W, 3] uint8 as patches [B, K, D] float32, those of a square together."""

    scale: Tensor
    """[3 · patch²] that numbers from 0 to 255 are multiplied by; ``shift`` is added."""
    shift: Tensor

    def __init__(self, settings: PictureSettings, rows: int, columns: int) -> None:
        super().__init__()
        self._settings, self._rows, self._columns = settings, rows, columns
        per_colour, inside = Standardised(settings.mean, settings.deviation), settings.patch**2
        for name in ("scale", "shift"):  # of each number of a patch: in one pass without strides
            numbers = getattr(per_colour, name).flatten().repeat_interleave(inside)
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        patch, merge, frames = self._settings.patch, self._settings.merge, self._settings.frames
        size = (self._rows * merge * patch, self._columns * merge * patch)
        x = pictures.permute(0, 3, 1, 2)
        if x.shape[-2:] != size:
            planes = colour_planes(pictures)
            x = functional.interpolate(planes, size=size, mode="bicubic", antialias=True)
            x = x.round_().clamp_(0, 255)
        # Colours first, then whole rows of a patch: many bytes are brought to their place at once,
        # in a quarter of the traffic that numbers would take.
        x = x.contiguous().view(len(x), 3, self._rows, merge, patch, self._columns, merge, patch)
        whole = torch.int64 if x.dtype == torch.uint8 and patch % 8 == 0 else x.dtype
        x = x.view(whole).permute(0, 2, 5, 3, 6, 1, 4, 7).contiguous().view(x.dtype).float()
        count = self._rows * self._columns * merge**2
        x = torch.addcmul(self.shift, x.view(len(x), count, -1), self.scale)
        colours = x.view(len(x), count, 3, -1)
        return torch.stack([colours] * frames, dim=3).view(len(x), count, -1)
