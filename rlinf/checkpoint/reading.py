"""Reads one checkpoint directory: verified first, decoded second, nothing executed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from rlinf.checkpoint.manifest import Manifest, read_file, read_manifest
from rlinf.checkpoint.tree import decode

TREE = "tree.json"


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
    tensors: dict[str, Tensor] = {}
    for name, expected in manifest.files.items():
        if name != TREE:
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
    for name, expected in manifest.files.items():
        read_file(Path(path), name, expected)
    return manifest
