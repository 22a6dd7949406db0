"""The files of one checkpoint: written with the manifest last, read after it; nothing executed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from rlinf.checkpoint.files import sync_directory, write_durable
from rlinf.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_file,
    check_size,
    read_file,
    read_manifest,
    record,
)
from rlinf.checkpoint.tree import EncodedTree, decode
from rlinf.errors import CheckpointError, UserError, told

_TREE = "tree.json"
_SHARD_BYTES = 512 << 20
_THREADS = 8


@dataclass(frozen=True)
class Parts:
    """Files of a checkpoint that workers wrote themselves, before it is committed."""

    directory: Path  # from `CheckpointStore.begin`
    files: dict[str, FileRecord]  # by name, relative to it: WORKERS/FILE


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that was not used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Manifest):
    """A checkpoint that was read and found unharmed: its manifest and what it holds."""

    path: Path
    tree: Any
    refused: tuple[PassedOver, ...] = ()
    """Newer ones that ``load("latest")`` had to pass over."""

    @contextmanager
    def read_as_written(self) -> Iterator[None]:
        """Meanwhile what it holds is read: tell a state that has other keys. It is unharmed, its
        checksums say so."""
        try:
            yield
        except (LookupError, TypeError, AttributeError) as error:
            cause = error.__cause__ or error  # in a worker
            if isinstance(cause, UserError):
                raise
            raise CheckpointError(
                f"{self.path} holds another state than is read here ({told(cause)}): it is of "
                "another version of the code, or of another recipe, or what reads it has a mistake"
            ) from error


def write_files(
    directory: Path, manifest: Manifest, tree: EncodedTree, parts: Parts | None
) -> None:
    """Write every file and the manifest, and return after all of it has reached the disk."""
    files: dict[str, FileRecord] = {} if parts is None else _found_parts(parts)

    def put(name: str, data: bytes) -> None:
        write_durable(directory / name, data)
        files[name] = record(data)

    put(_TREE, json.dumps(tree.structure, allow_nan=False).encode())
    for number, shard in enumerate(_shards(tree.tensors())):
        put(f"tensors-{number:05d}.safetensors", safetensors.torch.save(shard))
    complete = replace(manifest, files=files, unix_time=time.time())
    write_durable(directory / MANIFEST, complete.to_bytes())
    sync_directory(directory)


def _found_parts(parts: Parts) -> dict[str, FileRecord]:
    """Records of the workers' files, which are there, with names that have reached the disk."""
    for name, expected in parts.files.items():
        try:
            check_size(parts.directory, name, expected)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} It was written by a worker: the run's directory has to be on a file "
                "system that all nodes share. Nearest: checkpoint.layout whole."
            ) from error
    for directory in {(parts.directory / name).parent for name in parts.files}:
        sync_directory(directory)
    return dict(parts.files)


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split so that a file, which is built in memory, stays below the shard size."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        if shard and filled + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    if shard:
        yield shard


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
    structure = json.loads(read_file(path, _TREE, own.pop(_TREE)))
    tensors: dict[str, Tensor] = {}
    for name, expected in own.items():
        tensors.update(safetensors.torch.load(read_file(path, name, expected)))
    return Checkpoint(**vars(manifest), path=path, tree=decode(structure, tensors))


def _is_part(name: str) -> bool:
    """Whether a file was written by workers: such lie in directories of their own."""
    return "/" in name
