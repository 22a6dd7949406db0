"""The manifest of a checkpoint: what belongs to it, and how to see that all of it is unharmed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "rlinf-checkpoint"
FORMAT_VERSION = 2
STEP_NAME = re.compile(r"step_(\d{8,})")
"""Names of directories, each with the step of the checkpoint that is in it."""


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the writer of a checkpoint said about it."""

    step: int  # training steps that are done
    unix_time: float  # when it was written, seconds since 1970
    files: dict[str, FileRecord]  # every file but the manifest, by name
    meta: dict[str, Any] = field(default_factory=dict)  # read without loading tensors
    metric: float | None = None  # the best checkpoints are kept by it; higher is better
    config_hash: str | None = None  # of the configuration of the run

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON that carries its own checksum."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        content["manifest_sha256"] = _checksum(content)
        return json.dumps(content, indent=2, sort_keys=True, allow_nan=False).encode()


def record(data: bytes) -> FileRecord:
    """Return the size and checksum of a file's content."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def record_file(path: Path) -> FileRecord:
    """The record of a file that was written by others, read piece by piece."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


def read_manifest(directory: Path, *, renamed: bool = False) -> Manifest:
    """The verified manifest of a directory; CheckpointError if missing, damaged, later or, unless
    it may be ``renamed``, that of another step than the directory's name says."""
    try:
        with _readable(directory, MANIFEST):
            content = json.loads((directory / MANIFEST).read_bytes())
    except ValueError as error:
        raise _refusal(directory, f"{MANIFEST} is damaged ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refusal(directory, f"{MANIFEST} does not describe a checkpoint")
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise _refusal(
            directory, f"its format is version {version}, this program reads {FORMAT_VERSION}"
        )
    stated = content.pop("manifest_sha256", None)
    if stated != _checksum({**content, "format_version": version}):
        raise _refusal(directory, f"{MANIFEST} is damaged (its checksum differs)")
    del content["format"]
    named = STEP_NAME.fullmatch(directory.name)
    if named is not None and int(named[1]) != content["step"] and not renamed:
        # Taken for the newest one, it would let those beyond its step be discarded.
        raise _refusal(directory, f"it is of step {content['step']}: it was renamed or copied")
    files = {name: FileRecord(**entry) for name, entry in content.pop("files").items()}
    return Manifest(files=files, **content)


def read_file(directory: Path, name: str, expected: FileRecord) -> bytes:
    """The content of a file like its record; CheckpointError if missing, truncated or altered."""
    with _readable(directory, name):
        data = (directory / name).read_bytes()
    _compare(directory, name, expected, record(data))
    return data


def check_file(directory: Path, name: str, expected: FileRecord) -> None:
    """Compare a file with its record, without having all of it in memory."""
    with _readable(directory, name):
        found = record_file(directory / name)
    _compare(directory, name, expected, found)


def check_size(directory: Path, name: str, expected: FileRecord) -> None:
    """Compare the size of a file with its record."""
    with _readable(directory, name):
        size = (directory / name).stat().st_size
    _compare(directory, name, expected, replace(expected, bytes=size))


def _compare(directory: Path, name: str, expected: FileRecord, found: FileRecord) -> None:
    if found.bytes != expected.bytes:
        raise _refusal(directory, f"{name} has {found.bytes} bytes, {expected.bytes} were written")
    if found.sha256 != expected.sha256:
        raise _refusal(directory, f"{name} is damaged (its checksum differs)")


@contextmanager
def _readable(directory: Path, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        reason = f"{name} is missing" if directory.is_dir() else "there is no such directory"
        raise _refusal(directory, reason) from error
    except OSError as error:
        raise _refusal(directory, f"{name} cannot be read ({error.strerror})") from error


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refusal(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {directory} cannot be used: {reason}.")
