"""Reads one checkpoint directory: verified first, decoded second, nothing executed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from rlinf.checkpoint.manifest import Manifest, check_file, read_file, read_manifest
from rlinf.checkpoint.tree import decode

TREE = "tree.json"
_THREADS = 8


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that was not used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found unharmed."""

    tree: Any
    meta: dict[str, Any]
    step: int
    path: Path
    metric: float | None = None
    config_hash: str | None = None
    refused: tuple[Refusal, ...] = ()
    """Newer ones that ``load("latest")`` had to pass over."""


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read and verify the checkpoint in one directory.

    Raises:
        CheckpointError: It is missing or damaged; the message says which file and how.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    manifest = read_manifest(path)
    _check_parts(path, manifest)
    tensors: dict[str, Tensor] = {}
    for name, expected in manifest.files.items():
        if name != TREE and not is_part(name):
            tensors.update(safetensors.torch.load(read_file(path, name, expected)))
    structure = json.loads(read_file(path, TREE, manifest.files[TREE]))
    return Checkpoint(
        tree=decode(structure, tensors),
        meta=manifest.meta,
        step=manifest.step,
        path=path,
        metric=manifest.metric,
        config_hash=manifest.config_hash,
    )


def verify_checkpoint(path: Path | str) -> Manifest:
    """Return the manifest after comparing every file with it, without building tensors.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    manifest = read_manifest(Path(path))
    _check_parts(Path(path), manifest)
    for name, expected in manifest.files.items():
        if not is_part(name):
            read_file(Path(path), name, expected)
    return manifest


def is_part(name: str) -> bool:
    """Whether a file was written by workers: such lie in directories of their own."""
    return "/" in name


def _check_parts(path: Path, manifest: Manifest) -> None:
    """Compare what workers wrote, which they read themselves, with its records; several at once.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    parts = {name: found for name, found in manifest.files.items() if is_part(name)}
    if not parts:
        return
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="verify") as pool:
        for checked in [pool.submit(check_file, path, *part) for part in parts.items()]:
            checked.result()
