"""Networks of Qwen-VL policies: of random weights, or of a directory as models are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.data.json_files import read_settings
from rlinf.data.pictures import (
    BEGIN,
    END,
    PLACE,
    SETTINGS,
    VISION_TOKENS,
    Picture,
    check_folder,
)
from rlinf.errors import ConfigError, in_section
from rlinf.models.language import BUILDING, build_network
from rlinf.models.language_config import ArchitectureConfig, LanguageModelConfig, VisionConfig
from rlinf.models.vision_language import created
from rlinf.models.vla.instructions import Encode, encoding, hashed_words, read_tokenizer
from rlinf.models.vla.qwen_vl.config import QwenVLConfig

BINS = 256
_WORDS = 256
_TINY_IDS = {BEGIN: 1, PLACE: 2, END: 3}
_TINY_VISION = VisionConfig(hidden_size=32, layers=2, heads=2, intermediate_size=64, patch_size=8)


@dataclass(frozen=True)
class PictureSettings:
    """How pictures become patches: resized, (x / 255 - mean) / deviation, cut."""

    patch: int
    merge: int
    frames: int  # that a patch is deep, of which a picture fills all
    least: int  # pixels of the smallest picture
    most: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def squares(self, height: int, width: int, tokens: int | None) -> tuple[int, int]:
        """Rows and columns of a picture, of at most so many ``tokens``; ConfigError where its shape
        does not fit."""
        with BUILDING:  # several threads must not import transformers at once
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side = self.patch * self.merge
        most = self.most if tokens is None else min(self.most, tokens * side**2)
        found = smart_resize(height, width, side, min(self.least, most), most)
        rows, columns = (int(each) // side for each in found)
        if tokens is not None and rows * columns > tokens:
            raise ConfigError(
                f"pictures of {height} × {width} do not fit into {tokens} tokens; nearest: "
                f"{rows * columns}",
                key="model.max_image_tokens",
            )
        return rows, columns


@dataclass(frozen=True)
class ModelFiles:
    """What is small of a model, and may be refused, before its weights are read."""

    read: Callable[[], Any]  # gives the model with its weights
    settings: PictureSettings
    beginning: list[int]  # tokens before the pictures
    ids: dict[str, int]  # of the tokens around pictures
    encode: Encode  # what follows the last picture

    def laid_out(self, sizes: list[tuple[int, int]]) -> tuple[list[int], tuple[Picture, ...]]:
        """The beginning of a prompt with pictures of these rows and columns, up to the last one."""
        tokens, pictures = list(self.beginning), list[Picture]()
        for number, (rows, columns) in enumerate(sizes):
            tokens += [self.ids[END]] * (number > 0) + [self.ids[BEGIN]]
            none = np.zeros(0, np.uint8)
            pictures.append(Picture(data=none, first=len(tokens), rows=rows, columns=columns))
            tokens += [self.ids[PLACE]] * (rows * columns)
        return tokens, tuple(pictures)


def tiny_parts(config: QwenVLConfig, *, seed: int) -> ModelFiles:
    """A small model of random weights, which reads words by their checksums."""
    sizes = ArchitectureConfig(
        type=config.family or "qwen2_5_vl",
        vision=_TINY_VISION,
        hidden_size=64,
        layers=2,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    values = {
        "vocab_size": 4 + _WORDS + BINS,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }

    def read() -> Any:
        with BUILDING, torch.random.fork_rng(devices=[]):
            from transformers import AutoModelForImageTextToText

            torch.manual_seed(seed)
            return AutoModelForImageTextToText.from_config(
                created(sizes, values, _TINY_IDS), dtype=torch.float32
            )

    side = 2 * _TINY_VISION.patch_size
    settings = PictureSettings(_TINY_VISION.patch_size, 2, 2, side**2, 1280 * side**2)

    def encode(text: str) -> list[int]:
        return [_TINY_IDS[END], *hashed_words(text, first=4, words=_WORDS)]

    return ModelFiles(read, settings, [], _TINY_IDS, encode)


def published_parts(config: QwenVLConfig, path: Path) -> ModelFiles:
    """The model in a directory, in the number format that it says.

    Raises:
        ConfigError: A file or, as it is read, a weight is missing, or the model is of another
            family.
    """
    path = path.expanduser()
    with in_section("model"):
        check_folder(path)
    content = read_settings(path / "config.json", key="model.path")
    given = content.get("dtype") or content.get("torch_dtype")
    section = LanguageModelConfig(path=path, dtype="bfloat16" if given == "bfloat16" else "float32")
    tokenizer = read_tokenizer(config.tokenizer or path, *VISION_TOKENS)
    ids = {token: tokenizer.token_to_id(token) for token in VISION_TOKENS}

    def read() -> Any:
        with in_section("model"):
            model = build_network(section)
        rows = int(model.config.get_text_config().vocab_size)
        if max(ids.values()) >= rows - BINS:
            raise ConfigError(
                f"the tokenizer leaves none of the {rows} tokens of the model for actions",
                key="model.tokenizer",
            )
        return model

    encode = encoding(tokenizer)
    return ModelFiles(read, _settings(path), encode("<|im_start|>user\n"), ids, encode)


def question(text: str) -> str:
    """What is asked behind the last picture, in the form of Qwen's conversations."""
    asked = f"What action should the robot take to {text.lower()}?"
    return f"{END}{asked}<|im_end|>\n<|im_start|>assistant\n"


def _settings(path: Path) -> PictureSettings:
    try:
        if (path / SETTINGS).is_file():
            found = read_settings(path / SETTINGS, key="model.path")
        else:
            file = path / "processor_config.json"
            found = read_settings(file, key="model.path")["image_processor"]
        size = found.get("size") or {}
        return PictureSettings(
            patch=int(found["patch_size"]),
            merge=int(found["merge_size"]),
            frames=int(found["temporal_patch_size"]),
            least=int(found.get("min_pixels") or size["shortest_edge"]),
            most=int(found.get("max_pixels") or size["longest_edge"]),
            mean=tuple(found["image_mean"]),
            deviation=tuple(found["image_std"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say how pictures are read: {error!r}", key="model.path"
        ) from error
