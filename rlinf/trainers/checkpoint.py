"""Sharded checkpoints in the format of torch's distributed checkpoint: each rank writes its part,
any number of ranks reads them. Reading runs no code from the files: of their pickled index only the
classes of that format are built. Imports a good deal that one whole rank does not need."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlinf.errors import CheckpointError
from rlinf.trainers.ranks import Grid, Replicas

_INDEX = ".metadata"
_FORMAT = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_FORMAT}.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    f"{_FORMAT}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float64", "bfloat16", "int64"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""What an index consists of, by module."""
_MODULES = {"pathlib._local": "pathlib"}
"""What Python 3.13 calls a module that others know by another name: each reads what any wrote."""

Tree = Mapping[str, Any]
"""Tensors (distributed ones where ranks divide them) and plain data, by name, in any depth."""


def save_parts(directory: Path, tree: Tree, ranks: Grid | Replicas) -> list[Path]:
    """Write a tree, whose plain data is the same on every rank, into a directory of its own.

    Returns:
        Files that this rank wrote.

    Raises:
        OSError: A rank could not write; on all ranks.
        CheckpointError: Something else went wrong on one; on all ranks.
    """
    try:
        save(
            dict(tree),
            checkpoint_id=directory,
            process_group=ranks.group,
            no_dist=ranks.mesh is None,
        )
    except CheckpointException as error:  # no Exception, so that nobody else would catch it
        raise _failure(directory, [first for first, _ in error.failures.values()]) from error
    index = [directory / _INDEX] if ranks.rank == 0 else []
    return sorted(directory.glob(f"__{ranks.rank}_*")) + index


def _failure(directory: Path, errors: Sequence[BaseException]) -> Exception:
    for error in errors:
        # Where torch's own writer fails for it, the reason stands behind that.
        for found in (error, error.__cause__, error.__context__):
            if isinstance(found, OSError):
                return OSError(found.errno, found.strerror, str(directory))
    return CheckpointError(f"{directory} could not be written: {errors[0]}")


def load_parts(directory: Path, tree: Tree, ranks: Grid | Replicas) -> Tree:
    """Read in place what :func:`save_parts` wrote; the tree with its plain data.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    if not (directory / _INDEX).is_file():
        raise CheckpointError(f"{directory} holds no sharded checkpoint")
    state = dict(tree)
    _read(directory, state, _PlainPlanner(), group=ranks.group, alone=ranks.mesh is None)
    return state


def read_whole(directory: Path, names: Collection[str]) -> dict[str, Any]:
    """What :func:`save_parts` wrote under these names (``modules.policy.master``), whole, as a tree
    on the CPU; a CheckpointError where it cannot be read."""
    planner = _RoomForWhole(set(names))  # type: ignore[no-untyped-call]
    _read(directory, {}, planner, group=None, alone=True)
    return dict(planner.original_state_dict)  # the empty one that is given stays so


def _read(
    directory: Path, state: dict[str, Any], planner: DefaultLoadPlanner, *, group: Any, alone: bool
) -> None:
    """Fill a tree."""
    reader = PlainReader(directory)
    try:
        with warnings.catch_warnings():  # one rank reads alone, as it is meant to
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    except (CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{directory} is of another model: {reason[-1] if reason else error}"
        ) from error


def _memory_format(kind: Any, name: str) -> Any:
    """A member of the one enumeration of an index; Python up to 3.11.3 writes it as a getattr."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointError("the index of a checkpoint may not hold a builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        module = _MODULES.get(module, module)
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"the index of a checkpoint may not hold a {module}.{name}")
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """Builds of the index only what belongs to the format."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of a checkpoint; a CheckpointError where it holds something else."""
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainPlanner(DefaultLoadPlanner):
    """Takes numbers and text where there are no tensors, and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place; one that is no plain value is refused by torch."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _RoomForWhole(_PlainPlanner, _EmptyStateDictLoadPlanner):
    """Makes room for what the index names, so that no module is needed to read into."""
