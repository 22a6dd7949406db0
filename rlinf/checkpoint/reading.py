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


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Manifest):
    """A checkpoint that was read and found unharmed: its manifest and what it holds."""

    path: Path
    tree: Any
    refused: tuple[Refusal, ...] = ()
    """Newer ones that ``load("latest")`` had to pass over."""


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read and verify the checkpoint in one directory.

    What workers wrote, they read themselves; it is only compared with its records.

    Raises:
        CheckpointError: It is missing or damaged; the message says which file and how.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    manifest = read_manifest(path)
    own = {name: record for name, record in manifest.files.items() if not _is_part(name)}
    parts = [(name, record) for name, record in manifest.files.items() if _is_part(name)]
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="verify") as pool:
        for checked in [pool.submit(check_file, path, *part) for part in parts]:
            checked.result()
    structure = json.loads(read_file(path, TREE, own.pop(TREE)))
    tensors: dict[str, Tensor] = {}
    for name, expected in own.items():
        tensors.update(safetensors.torch.load(read_file(path, name, expected)))
    return Checkpoint(**vars(manifest), path=path, tree=decode(structure, tensors))


def _is_part(name: str) -> bool:
    """Whether a file was written by workers: such lie in directories of their own."""
    return "/" in name
