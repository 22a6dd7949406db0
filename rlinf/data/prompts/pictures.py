"""Pictures of prompts, from the fields of records to runs of tokens.

In the text of a prompt ``<image>`` is where a picture goes, as in the published sets; where a text
has none, its pictures come before what the user says first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.pictures import BEGIN, END, PLACE, Picture, PictureReader, Pictures
from rlinf.data.prompts.prompt_files import PICTURE_MARK as MARK
from rlinf.data.prompts.prompt_files import Message, RawPrompt, UnusableRecordError
from rlinf.errors import ConfigError, shortened

Source = bytes | Path
"""A picture as a file holds it, or where that file is."""
Content = str | Sequence[Message]
_SHOWN = 160
"""Characters of a name in a record that are told; what is taken for one may have millions."""
_BASE64_BEGINS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}


def sources_of(value: Any, key: str, folder: Path) -> tuple[Source, ...]:
    """Pictures in the field of a record: one or a list of them, or null for none.

    Each is the path of a file, from ``folder`` if it is not absolute, the bytes of one, both in a
    mapping as sets in Parquet have them, or a ``data:`` URL. UnusableRecordError where it is none.
    """
    if value is None:
        return ()
    found = value if isinstance(value, list | tuple) else [value]
    return tuple(_source(each, key, folder) for each in found)


def _source(value: Any, key: str, folder: Path) -> Source:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        kind = type(value).__name__
        raise UnusableRecordError(f"`{key}` is a path or the bytes of a picture, not {kind}")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition("base64,")[2], validate=True)
        except binascii.Error as error:
            raise UnusableRecordError(f"`{key}` holds no base64: {error}") from error
    shown = shortened(value, _SHOWN)
    if "://" in value:
        raise UnusableRecordError(f"`{key}` is the address {shown}; nothing is downloaded")
    if (encoded := _encoded_kind(value)) is not None:
        why = f"is a picture in base64; write data:image/{encoded};base64, before it"
        raise UnusableRecordError(f"`{key}`, {shown}, {why}")
    try:
        return folder / Path(value).expanduser()
    except RuntimeError as error:  # ~NAME of nobody
        raise UnusableRecordError(f"`{key}`, {shown}, is in no home directory") from error


def _encoded_kind(value: str) -> str | None:
    """Of which kind a picture in base64 is; None for what is none, such as a path."""
    kind = next((kind for begin, kind in _BASE64_BEGINS.items() if value.startswith(begin)), None)
    try:
        base64.b64decode(value if kind else "", validate=True)
    except ValueError:  # binascii.Error, or a letter beyond ASCII
        return None
    return kind


def _read(source: Source) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


class PicturedPrompt:
    """A prompt whose pictures were looked at.

    Args:
        item: The prompt.
        reader: Of the model; None: it reads none.

    Attributes:
        content: Its text or messages with a run of tokens for each picture.

    Raises:
        ConfigError: There are pictures, and no reader.
        UnusableRecordError: A picture is not there or broken, or marks and pictures differ in
            number.
    """

    def __init__(self, item: RawPrompt, reader: PictureReader | None) -> None:
        self.content: Content = item.content
        self._sizes: list[tuple[int, int]] = []
        self._data: list[bytes] = []
        self._token = -1
        if item.pictures is None:
            return
        if item.pictures and reader is None:
            raise ConfigError("the prompts have pictures, and nothing says how they are read")
        for number, source in enumerate(item.pictures, 1):
            assert reader is not None
            try:
                data = _read(source)
                self._sizes.append(reader.size(data))
            except OSError as error:
                name = shortened(str(error.filename), _SHOWN)
                why = f"{name}: {error.strerror or error}"
                raise UnusableRecordError(f"picture {number}: {why}") from error
            except ValueError as error:
                raise UnusableRecordError(f"picture {number} {error}") from error
            self._data.append(data)
        self._token = -1 if reader is None else reader.place_token
        self.content = self._marked(item.content)

    def _marked(self, content: Content) -> Content:
        runs = [BEGIN + PLACE * (rows * columns) + END for rows, columns in self._sizes]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        texts = [str(message["content"]) for message in messages]
        marks = sum(text.count(MARK) for text in texts)
        if not marks and runs:
            roles = [message["role"] for message in messages]
            asked = roles.index("user") if "user" in roles else 0
            texts[asked] = MARK * len(runs) + texts[asked]
        elif marks != len(runs):
            raise UnusableRecordError(f"has {marks} times {MARK} for {len(runs)} pictures")
        rest = iter(runs)
        for place, text in enumerate(texts):
            first, *others = text.split(MARK)
            texts[place] = first + "".join(next(rest) + other for other in others)
        if isinstance(content, str):
            return texts[0]
        return tuple({**m, "content": text} for m, text in zip(messages, texts, strict=True))

    def placed(self, tokens: Sequence[int]) -> Pictures:
        """The pictures where they stand in the tokens of the prompt; UnusableRecordError where the
        text itself holds a token of pictures."""
        if not self._data:
            return ()
        places = np.flatnonzero(np.asarray(tokens) == self._token)
        sizes = [rows * columns for rows, columns in self._sizes]
        if len(places) != sum(sizes):
            raise UnusableRecordError(f"its text holds the token {PLACE} of pictures")
        firsts = np.cumsum([0, *sizes[:-1]])
        return tuple(
            Picture(
                data=np.frombuffer(data, np.uint8),
                first=int(places[first]),
                rows=rows,
                columns=columns,
            )
            for data, first, (rows, columns) in zip(self._data, firsts, self._sizes, strict=True)
        )
