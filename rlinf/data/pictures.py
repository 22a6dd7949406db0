"""Pictures in prompts: what travels of them, which tokens they stand for, and their pixel values.

A picture crosses between processes as its file holds it, once for all answers to a prompt; who runs
the model makes pixel values of it. In a prompt it is a run of equal tokens, one for each square of
pixels, that have the positions of a grid (Qwen2-VL, Wang et al. 2024, section 2.1). Imports neither
torch nor transformers at the top, so that a recipe is checked in an instant.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError, MissingPackageError

BEGIN, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
VISION_TOKENS = (BEGIN, PLACE, END)
"""Before a picture, in the place of each square of it, and behind it, in the Qwen-VL families."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""``model_type`` of models whose pictures are understood."""
SETTINGS = "preprocessor_config.json"
_FILES = (
    SETTINGS, "processor_config.json", "video_preprocessor_config.json", "chat_template.json",
)  # fmt: skip
"""What a model's folder says of pictures, beside its configuration and tokenizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A picture in a prompt.

    Args:
        data: [bytes] uint8, the picture as a file holds it.
        first: Place of its first token in the prompt, from 0.
        rows: Of squares, each a token; it is resized to that.
        columns: Likewise.
    """

    data: np.ndarray
    first: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Tokens that it stands for."""
        return self.rows * self.columns

    @cached_property
    def digest(self) -> bytes:
        """Hash of what is seen, and where."""
        found = hashlib.sha256(self.data.tobytes())
        found.update(f"{self.first}/{self.rows}/{self.columns}".encode())
        return found.digest()


Pictures = tuple[Picture, ...]
"""Those of one prompt, in their order."""


def positions_of(length: int, pictures: Pictures) -> np.ndarray:
    """[3, length] int64, positions of tokens in time, height and width.

    Text goes on by one in all three. The squares of a picture have its time, and their row and
    column; the text behind it goes on after its longer side.
    """
    found = np.empty((3, length), np.int64)
    place = position = 0
    for picture in pictures:
        found[:, place : picture.first] = position + np.arange(picture.first - place)
        position += picture.first - place
        place = picture.first + picture.tokens
        row, column = np.divmod(np.arange(picture.tokens), picture.columns)
        found[:, picture.first : place] = position + np.stack([0 * row, row, column])
        position += max(picture.rows, picture.columns)
    found[:, place:] = position + np.arange(length - place)
    return found


def shift_of(pictures: Pictures) -> int:
    """What the position of a token behind all pictures has more than its place; mostly negative."""
    return sum(max(each.rows, each.columns) - each.tokens for each in pictures)


def places_of(pictures: Pictures) -> np.ndarray:
    """[·] int64, places in the prompt of the tokens of pictures, in their order."""
    parts = [np.arange(each.first, each.first + each.tokens) for each in pictures]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def reads_pictures(folder: Path) -> bool:
    """Whether the model in a folder has a part that reads pictures; ConfigError where its
    ``config.json`` cannot be read."""
    return "vision_config" in read_settings(folder.expanduser() / "config.json", key="path")


class PictureReader:
    """Pictures as a model was taught to see them, by the files in its folder.

    Args:
        folder: Of the model, or of a tokenizer beside the settings of pictures.
        tokenizer: Of the model.

    Raises:
        ConfigError: The model reads no pictures, or a file that says how is missing or broken.
        MissingPackageError: Pillow is not installed.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        folder = folder.expanduser()
        check_folder(folder)
        try:
            import PIL.Image  # noqa: F401
            from transformers import AutoImageProcessor
        except ImportError as error:
            package = "pillow" if (error.name or "").startswith("PIL") else "transformers"
            raise MissingPackageError(package, "language", "pictures in prompts") from error
        try:
            # Everywhere the same arithmetic, whether or not torchvision is installed.
            found = AutoImageProcessor.from_pretrained(
                str(folder.resolve()), local_files_only=True, backend="pil"
            )
            self._square = int(found.patch_size * found.merge_size)
            self._bounds = int(found.size["shortest_edge"]), int(found.size["longest_edge"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = " ".join(str(error).split())[:300]
            reason = f"{folder} does not say how pictures are read: {why}"
            raise ConfigError(reason, key="path") from error
        self._processor, self._merge = found, int(found.merge_size)
        self._most: int | None = None
        known = tokenizer.get_vocab()
        missing = [token for token in VISION_TOKENS if token not in known]
        if missing:
            raise ConfigError(f"the tokenizer has no token {missing[0]}", key="path")
        self.place_token = int(known[PLACE])

    def limited(self, most: int | None) -> PictureReader:
        """The same, with pictures made smaller that would be more than ``most`` tokens."""
        found = copy.copy(self)
        found._most = most
        return found

    def size(self, data: bytes) -> tuple[int, int]:
        """Rows and columns of squares that a picture gets; ValueError where it cannot be decoded.

        It keeps about its shape and size, within the bounds of the model's settings.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = _decoded(data).size
        most, (low, high) = self._most, self._bounds
        if most is not None:
            high = min(high, most * self._square**2)
        resized = smart_resize(height, width, self._square, min(low, high), high)
        rows, columns = (int(side) // self._square for side in resized)
        if most is not None and rows * columns > most:
            raise ValueError(f"a shape of {width} × {height} does not fit into {most} tokens")
        return rows, columns

    def pixels(self, pictures: Sequence[Picture]) -> tuple[np.ndarray, np.ndarray]:
        """[K, D] float32, K patches in the order of the pictures, and [n, 3] int64, patches of each
        in time, height and width."""
        from PIL import Image

        side = self._square
        images = [
            _decoded(each.data.tobytes()).resize(
                (each.columns * side, each.rows * side), Image.Resampling.BICUBIC
            )
            for each in pictures
        ]
        found = self._processor(images=images, do_resize=False, return_tensors="np")
        return found["pixel_values"].astype(np.float32), found["image_grid_thw"].astype(np.int64)

    def blank(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest picture, black, as :meth:`pixels` gives it."""
        merge, processor = self._merge, self._processor
        width = 3 * processor.temporal_patch_size * processor.patch_size**2
        grid = np.array([[1, merge, merge]], np.int64)
        return np.zeros((merge * merge, width), np.float32), grid


def write_settings(folder: Path, *, patch_size: int) -> None:
    """Write how pictures are read by a model that is created: squares of two by two patches, as
    many as the picture has."""
    square = 2 * patch_size
    content = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": square**2, "longest_edge": 1280 * square**2},
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / SETTINGS).write_text(text, encoding="utf-8")


def copy_settings(source: Path | None, target: Path) -> None:
    """Take along what a model's folder says of pictures, if anything."""
    for name in _FILES if source is not None else ():
        assert source is not None
        if (source.expanduser() / name).is_file():
            shutil.copyfile(source.expanduser() / name, target / name)


def check_folder(folder: Path) -> None:
    """Refuse, by a ConfigError, a model that reads no pictures, or of which nobody says how."""
    if (folder / "config.json").is_file():
        if not reads_pictures(folder):
            raise ConfigError(
                f"the model in {folder} reads text only, and prompts have pictures; nearest: a "
                f"model of the families {', '.join(FAMILIES)}",
                key="path",
            )
        family = read_settings(folder / "config.json", key="path").get("model_type")
        if family not in FAMILIES:
            legal = ", ".join(FAMILIES)
            reason = f"pictures of the family {family} are not known; legal: {legal}"
            raise ConfigError(reason, key="path")
    if not any((folder / name).is_file() for name in _FILES[:2]):
        raise ConfigError(
            f"{folder} holds no {SETTINGS}, which says how pictures are read; nearest: that file "
            "of the published model beside the weights",
            key="path",
        )


def png(values: np.ndarray) -> bytes:
    """A picture [H, W, 3] uint8 as a file holds it, without loss."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def _decoded(data: bytes) -> Any:
    """The picture in red, green and blue, the right way up and on white where it is transparent;
    ValueError where it is none, broken, or of more than bytes."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):  # which would be cut off at 255
                raise ValueError(f"has numbers of mode {image.mode}; nearest: 8 bits a channel")
            upright = ImageOps.exif_transpose(image)
            if upright.mode.endswith(("A", "a")) or "transparency" in upright.info:
                seen = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
            return upright.convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError("is no picture of a known kind") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is a broken picture: {error}") from error
