"""Reads torch's distributed checkpoints without running code that stands in them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from rlinf.errors import CheckpointError

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


def _memory_format(kind: Any, name: str) -> Any:
    """A member of the one enumeration of an index, which Python up to 3.11.3 writes as a getattr.

    Raises:
        CheckpointError: Something else was asked for.
    """
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointError("the index of a checkpoint may not hold a builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"the index of a checkpoint may not hold a {module}.{name}")
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """Builds of the index only what belongs to the format."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of a checkpoint.

        Raises:
            CheckpointError: It holds something else.
        """
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Takes numbers and text where there are no tensors, and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place; one that is no plain value is refused by torch."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
