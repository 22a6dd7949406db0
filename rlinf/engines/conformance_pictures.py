"""What the conformance suite of the engines knows of pictures: a tiny model that reads them, and
prompts that begin with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.pictures import (
    VISION_TOKENS,
    Picture,
    PictureReader,
    Pictures,
    png,
    write_settings,
)
from rlinf.models.language_config import ArchitectureConfig, VisionConfig
from rlinf.models.vision_language import created

_PATCH = 8
_SQUARE = 2 * _PATCH  # pixels of a side; each square is a token


def seeing_architecture(sizes: dict[str, Any], first: int) -> Any:
    """The configuration of a Qwen3-VL of two layers whose language part has ``sizes``.

    The tokens of pictures are ``first`` and the two after it; one more has no name, see
    :class:`Sight`.
    """
    section = ArchitectureConfig(
        type="qwen3_vl",
        hidden_size=sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        intermediate_size=sizes["intermediate_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
        tie_word_embeddings=False,
        vision=VisionConfig(hidden_size=32, heads=2, intermediate_size=64, patch_size=_PATCH),
    )
    text = {**sizes, "vocab_size": first + len(VISION_TOKENS) + 1}
    names = {name: first + number for number, name in enumerate(VISION_TOKENS)}
    config = created(section, text, names)
    config.vision_config.initializer_range = sizes["initializer_range"]
    return config


class Sight:
    """Prompts with pictures, and what the library's model is given for them.

    The library finds pictures by the value of tokens, so that it cannot be asked for a text in
    which the model itself sampled one of these. Such a token is replaced by its twin, a token
    without a name that is embedded alike.

    Args:
        folder: Where the model lies; the settings of pictures are written beside it.
        tokenizer: That knows the tokens of pictures.
        first: The first of those.
    """

    def __init__(self, folder: Path, tokenizer: Any, first: int) -> None:
        write_settings(folder, patch_size=_PATCH)
        self._reader = PictureReader(folder, tokenizer)
        self._begin, self._place, self._end = range(first, first + len(VISION_TOKENS))
        self._twin = self._end + 1

    def join(self, model: Any) -> None:
        """Embed the twin as the token whose place it takes."""
        with torch.no_grad():
            table = model.get_input_embeddings().weight
            table[self._twin] = table[self._place]

    def prompt(self, text: np.ndarray, *, seed: int | None = None) -> tuple[np.ndarray, Pictures]:
        """[P] tokens of a picture with ``text`` [T] behind it.

        Equal texts have equal pictures, in their size as well, but for a ``seed``.
        """
        drawn = np.random.default_rng(int(text[0]))
        rows, columns = (int(side) for side in drawn.integers(1, 4, 2))
        if seed is not None:
            drawn = np.random.default_rng((seed, rows))
        shape = (rows * _SQUARE, columns * _SQUARE, 3)
        data = np.frombuffer(png(drawn.integers(0, 256, shape, dtype=np.uint8)), np.uint8)
        picture = Picture(data=data, first=1, rows=rows, columns=columns)
        squares = [self._place] * picture.tokens
        return np.array([self._begin, *squares, self._end, *text], np.int64), (picture,)

    def arguments(self, text: np.ndarray, pictures: Pictures) -> dict[str, Tensor]:
        """What the library's model is called with, for tokens [T] with pictures among them."""
        kinds = np.zeros_like(text)
        for picture in pictures:
            kinds[picture.first : picture.first + picture.tokens] = 1
        ids = np.where((text == self._place) & (kinds == 0), self._twin, text)
        pixels, grids = self._reader.pixels(pictures)
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "attention_mask": torch.ones(1, len(text), dtype=torch.int64),
            "mm_token_type_ids": torch.from_numpy(kinds)[None],
            "pixel_values": torch.from_numpy(pixels),
            "image_grid_thw": torch.from_numpy(grids),
        }
