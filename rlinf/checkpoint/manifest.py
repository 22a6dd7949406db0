"""The manifest of a checkpoint: what belongs to it, and how to see that all of it is unharmed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "rlinf-checkpoint"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the writer of a checkpoint said about it."""

    step: int
    """Number of training steps that are done."""
    unix_time: float
    """When it was written, seconds since 1970."""
    files: dict[str, FileRecord]
    """Every file but the manifest, by name."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to read without loading tensors."""
    metric: float | None = None
    """Figure by which the best checkpoints are kept; higher is better."""
    config_hash: str | None = None
    """Hash of the configuration of the run."""

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


def read_manifest(directory: Path) -> Manifest:
    """Return the verified manifest of a checkpoint directory.

    Raises:
        CheckpointError: It is missing, damaged, or of a later format.
    """
    try:
        content = json.loads(_read(directory, MANIFEST))
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
    files = {name: FileRecord(**entry) for name, entry in content.pop("files").items()}
    return Manifest(files=files, **content)


def read_file(directory: Path, name: str, expected: FileRecord) -> bytes:
    """Return the content of one file after comparing it with its record.

    Raises:
        CheckpointError: The file is missing, truncated or altered.
    """
    data = _read(directory, name)
    if len(data) != expected.bytes:
        reason = f"{name} has {len(data)} bytes, {expected.bytes} were written"
        raise _refusal(directory, reason)
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise _refusal(directory, f"{name} is damaged (its checksum differs)")
    return data


def check_file(directory: Path, name: str, expected: FileRecord) -> None:
    """Compare a file with its record, without having all of it in memory.

    Raises:
        CheckpointError: The file is missing, truncated or altered.
    """
    check_size(directory, name, expected)
    if record_file(directory / name) != expected:
        raise _refusal(directory, f"{name} is damaged (its checksum differs)")


def check_size(directory: Path, name: str, expected: FileRecord) -> None:
    """Compare the size of a file with its record.

    Raises:
        CheckpointError: The file is missing, or of another size.
    """
    try:
        size = (directory / name).stat().st_size
    except FileNotFoundError as error:
        raise _refusal(directory, f"{name} is missing") from error
    if size != expected.bytes:
        raise _refusal(directory, f"{name} has {size} bytes, {expected.bytes} were written")


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
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
