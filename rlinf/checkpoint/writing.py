"""Write one checkpoint: its files, then the manifest that makes it one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
from torch import Tensor

from rlinf.checkpoint.files import sync_directory, write_durable
from rlinf.checkpoint.manifest import MANIFEST, FileRecord, Manifest, check_size, record
from rlinf.checkpoint.reading import TREE
from rlinf.checkpoint.tree import EncodedTree
from rlinf.errors import CheckpointError

_SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class Parts:
    """Files of a checkpoint that workers wrote themselves, before it is committed."""

    directory: Path  # from `CheckpointStore.begin`
    files: dict[str, FileRecord]  # by name, relative to it: WORKERS/FILE


def write_files(
    directory: Path, manifest: Manifest, tree: EncodedTree, parts: Parts | None
) -> None:
    """Write every file and the manifest, and return after all of it has reached the disk."""
    files: dict[str, FileRecord] = {} if parts is None else _found_parts(parts)

    def put(name: str, data: bytes) -> None:
        write_durable(directory / name, data)
        files[name] = record(data)

    put(TREE, json.dumps(tree.structure, allow_nan=False).encode())
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
