"""Files and directories that a configuration names: where they are, and if they are the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlinf.config.base import StrictModel
from rlinf.config.reference import file_of

Config = TypeVar("Config", bound=StrictModel)

LATEST = "latest"
"""Name of the link to the newest run beside it."""
_WHOLE = 16 * 2**20
_PIECES, _PIECE = 256, 2**16
_UNREAD = {".md", ".log"}

Fingerprint = Mapping[str, str]
"""Of a file or a directory: of each file in it its name and a digest of its content."""


def named_files(config: StrictModel) -> Iterator[tuple[str, Path]]:
    """Yield the dotted keys of all that a configuration reads from the disk, with the path; of a
    module of the user's own it is ``SECTION.module NAME``."""
    yield from ((f"module {name}", path) for name, path in config.own_modules().items())
    for name in type(config).model_fields:
        if name in config.not_read:
            continue
        for key, value in _entries(name, getattr(config, name)):
            if isinstance(value, Path):
                yield key, value
            elif name in config.code_files and (file := file_of(value)):
                yield key, file
            elif isinstance(value, StrictModel):
                yield from ((f"{key}.{below}", path) for below, path in named_files(value))


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        for place, each in enumerate(value):
            yield f"{key}.{place}", each
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield f"{key}.{name}", each
    else:
        yield key, value


def at_absolute_paths(config: Config) -> Config:
    """Return the configuration with the paths of what it reads made absolute, so that it means the
    same in every working directory; ``latest`` becomes the run that it points to now."""
    changed = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in config.not_read:
            continue
        if name in config.code_files and (file := file_of(value)):
            other: Any = f"{_absolute(file)}:{value.rpartition(':')[2]}"
        else:
            other = _absolute(value)
        if other is not value and other != value:
            changed[name] = other
    return config.model_copy(update=changed) if changed else config


def _absolute(value: Any) -> Any:
    """``value`` itself where no path is in it, or none that changes."""
    if isinstance(value, StrictModel):
        return at_absolute_paths(value)
    if isinstance(value, Path):
        found = _without_latest(Path(os.path.abspath(value.expanduser())))
        return value if found == value else found
    if isinstance(value, tuple):
        entries = tuple(map(_absolute, value))
        return value if all(map(_same, entries, value)) else entries
    if isinstance(value, Mapping):
        named = {key: _absolute(each) for key, each in value.items()}
        return value if all(map(_same, named.values(), value.values())) else named
    return value


def _same(one: Any, other: Any) -> bool:
    return one is other


def _without_latest(path: Path) -> Path:
    """Other links are kept: another machine may have them elsewhere."""
    found = Path(path.anchor)
    for part in path.parts[1:]:
        found /= part
        if part == LATEST and found.is_symlink():
            found = found.parent / os.readlink(found)
    return found


def fingerprint(path: Path) -> Fingerprint:
    """What tells a file, or a directory with all below it, from another one; cheap.

    Of a file of more than 16 MiB the length and 256 pieces of 64 KiB are read, evenly apart, which
    training changes all over. Notes (`.md`, `.log`) and what is hidden do not count.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    path = path.expanduser()
    if not path.is_dir():
        return {path.name: _digest(path)}
    files = (each for each in sorted(path.rglob("*")) if each.is_file())
    named = {each.relative_to(path): each for each in files if each.suffix not in _UNREAD}
    return {
        name.as_posix(): _digest(file)
        for name, file in named.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def _digest(file: Path) -> str:
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with open(file, "rb") as opened:
        if size <= _WHOLE:
            found.update(opened.read())
        else:
            for piece in range(_PIECES):
                opened.seek((size - _PIECE) * piece // (_PIECES - 1))
                found.update(opened.read(_PIECE))
    return found.hexdigest()
