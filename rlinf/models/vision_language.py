"""Language models that read pictures, of the families Qwen2.5-VL and Qwen3-VL of transformers.

Which tokens are squares of a picture is known by their places and not by their value, so that a
square's token that the model itself sampled is a token like any other, in rollout and training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.pictures import VISION_TOKENS, PictureReader, Pictures
from rlinf.errors import ConfigError
from rlinf.models.policy import repeated_layers

if TYPE_CHECKING:
    from rlinf.models.language_config import ArchitectureConfig

_OF_HEIGHT = {"qwen2_5_vl": 24, "qwen3_vl": 20}
"""Of 64 pairs of rotated numbers those that turn with the row, and as many with the column, as in
the published models; the rest turns with time."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The pictures of one forward pass over tokens [N, T].

    Args:
        pixels: [K, D] patches of all, in the order of their places.
        grids: [n, 3] int64, patches of each in time, height and width.
        places: [S] int64, ascending, where their squares stand in the tokens, flattened. Squares
            beyond S count nowhere: they are computed so that every rank computes some.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor

    @classmethod
    def of(
        cls, reader: PictureReader, rows: Sequence[tuple[Pictures, np.ndarray]], *, blank: bool
    ) -> Seen | None:
        """What is to be seen, on the host.

        Args:
            reader: Makes pixel values.
            rows: Pictures of each row of tokens, and the places of their squares.
            blank: Where there are none, look at a black one that counts nowhere.
        """
        pictures = [each for found, _ in rows for each in found]
        if not pictures and not blank:
            return None
        pixels, grids = reader.pixels(pictures) if pictures else reader.blank()
        places = np.concatenate([np.zeros(0, np.int64), *(found for _, found in rows)])
        return cls(
            pixels=torch.from_numpy(pixels),
            grids=torch.from_numpy(grids),
            places=torch.from_numpy(places),
        )

    def to(self, device: torch.device) -> Seen:
        """The same on a device."""
        return Seen(
            pixels=self.pixels.to(device),
            grids=self.grids.to(device),
            places=self.places.to(device),
        )


def hidden_states(backbone: Any, input_ids: Tensor, seen: Seen, **options: Any) -> Tensor:
    """[N, T, H], what the layers say of tokens [N, T] with pictures among them.

    Args:
        backbone: The model without its vocabulary layer.
        input_ids: [N, T]; what stands in the places of squares is not looked at.
        seen: The pictures.
        options: For the language layers.
    """
    embedded = backbone.get_input_embeddings()(input_ids)
    found = backbone.get_image_features(seen.pixels, seen.grids, return_dict=True)
    count = len(seen.places)
    # Qwen3-VL adds features of several depths to the first layers of the language part.
    deep = [torch.cat(list(part)) for part in getattr(found, "deepstack_features", None) or ()]
    features = torch.cat(list(found.pooler_output)).to(embedded.dtype)
    flat = embedded.flatten(0, 1).index_copy(0, seen.places, features[:count])
    for part in (features, *deep):
        flat = flat + 0.0 * part[count:].sum().to(flat.dtype)
    if deep:
        shown = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        options["visual_pos_masks"] = shown.index_fill(0, seen.places, True).view_as(input_ids)
        options["deepstack_visual_embeds"] = [part[:count] for part in deep]
    hidden: Tensor = backbone.language_model(
        inputs_embeds=flat.view_as(embedded), **options
    ).last_hidden_state
    return hidden


def vision_of(model: Any) -> nn.Module | None:
    """The part of a model of transformers that reads pictures; None: it reads text only."""
    return next((part for name, part in model.named_modules() if last_part(name) == "visual"), None)


def set_text_attention(model: Any, name: str) -> None:
    """Let the language layers attend by a registered function; pictures are attended as before."""
    text = vision_of(model) is None
    model.set_attn_implementation(name if text else {"text_config": name})


def attended_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the language part, and those that read pictures."""
    vision = vision_of(model)
    if vision is None:
        return repeated_layers(model)
    inside = set(map(id, vision.modules()))
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    text = max((each for each in lists if id(each) not in inside), key=len)
    return [*text, *repeated_layers(vision)]


def created(config: ArchitectureConfig, text: dict[str, Any], vocabulary: Mapping[str, int]) -> Any:
    """The configuration of a small model with every block of its vision part looking at the whole
    picture; ``text`` are the values of the language part, ``vocabulary`` the ids of tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    vision = config.vision
    assert vision is not None, "a rule of the section"
    missing = [token for token in VISION_TOKENS if token not in vocabulary]
    if missing:
        raise ConfigError(f"the tokenizer has no token {missing[0]}", key="path")
    begin, place, end = (vocabulary[token] for token in VISION_TOKENS)
    half = config.hidden_size // config.heads // 2
    height = half * _OF_HEIGHT[config.type] // 64
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [half - 2 * height, height, height],
    }
    seeing: dict[str, Any] = {
        "depth": vision.layers,
        "hidden_size": vision.hidden_size,
        "num_heads": vision.heads,
        "intermediate_size": vision.intermediate_size,
        "out_hidden_size": config.hidden_size,
        "patch_size": vision.patch_size,
    }
    common = {
        "image_token_id": place,
        "video_token_id": place,
        "vision_start_token_id": begin,
        "vision_end_token_id": end,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.type == "qwen2_5_vl":
        seeing["fullatt_block_indexes"] = list(range(vision.layers))
        return Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=seeing, **common
        )
    seeing |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 256}
    rope["mrope_interleaved"] = True
    head = config.hidden_size // config.heads
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope, "head_dim": head},
        vision_config=seeing,
        **common,
    )


def last_part(name: str) -> str:
    """Of a name with dots in it, behind the last one."""
    return name.rpartition(".")[2]
