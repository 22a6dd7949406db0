"""Flat buckets: ranges of a layout, filled on one side and taken apart on the other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.layout import Entry, Layout, flat_bytes

_ALONE_BYTES = 1 << 20
_MOST_ALONE = 128  # each becomes a memory mapping of the receiver

Range = tuple[int, int]


def plan_buckets(layout: Layout, bucket_size: int) -> list[Range]:
    """Cut a layout into ranges of bytes, none longer than ``bucket_size``.

    A large tensor has buckets of its own: it need not be copied together with others first.
    """
    alone = max(_ALONE_BYTES, layout.nbytes // _MOST_ALONE)
    ranges: list[Range] = []
    begin = end = 0
    for entry in layout.owners:
        if not entry.nbytes:
            continue
        together = entry.nbytes < min(alone, bucket_size)
        if end > begin and not (together and entry.end - begin <= bucket_size):
            ranges.append((begin, end))
            begin = end
        if together:
            begin, end = (begin if end > begin else entry.offset), entry.end
        else:
            cuts = [*range(entry.offset, entry.end, bucket_size), entry.end]
            ranges += itertools.pairwise(cuts)
            begin = end = entry.end
    return [*ranges, (begin, end)] if end > begin else ranges


def entries_in(layout: Layout, bucket: Range) -> list[Entry]:
    """Entries that lie in a bucket, wholly or in part."""
    begin, end = bucket
    return [e for e in layout.owners if e.nbytes and e.offset < end and e.end > begin]


class Packer:
    """Reads the buckets of one update out of the sender's tensors.

    Args:
        layout: Where tensors lie.
        weights: The tensors.
    """

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._weights = weights
        self._latest: tuple[str, Tensor] | None = None

    def alone(self, bucket: Range) -> Tensor | None:
        """[n] uint8 bytes of a bucket within one CPU tensor, by reference where it needs no cast.

        None where the bucket holds several tensors.
        """
        begin, end = bucket
        entries = entries_in(self._layout, bucket)
        if len(entries) != 1:
            return None
        return self._bytes(entries[0])[begin - entries[0].offset : end - entries[0].offset]

    def fill(self, bucket: Range, flat: Tensor) -> None:
        """Copy a bucket into [n] uint8 memory, casting on the way."""
        begin, end = bucket
        for entry in entries_in(self._layout, bucket):
            if begin <= entry.offset and entry.end <= end:
                entry.view(flat, begin).copy_(self._weights[entry.name])
            else:  # the bucket is a part of one tensor
                flat.copy_(self._bytes(entry)[begin - entry.offset : end - entry.offset])

    def _bytes(self, entry: Entry) -> Tensor:
        if self._latest is None or self._latest[0] != entry.name:
            tensor = self._weights[entry.name].to(entry.dtype).cpu()
            self._latest = entry.name, flat_bytes(tensor)
        return self._latest[1]


class HostPool:
    """Memory for buckets that are passed by reference within a process.

    Fresh pages cost more than the copy into them, so memory is used again as soon as the last
    tensor that looks at it is gone.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, nbytes: int) -> Tensor:
        """[n] uint8 memory that nobody looks at."""
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else np.empty(nbytes, np.uint8)
        view = memory[:]
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


def unpack(
    layout: Layout, ranges: Sequence[Range], parts: Sequence[Tensor], pool: HostPool
) -> dict[str, Tensor]:
    """The tensors of an update: views of the buckets, or joined where one has several.

    Args:
        layout: Where tensors lie.
        ranges: What each bucket covers.
        parts: [n] uint8 bytes of each bucket.
        pool: Memory for joined tensors.

    Raises:
        WeightSyncError: A bucket has another length than its range.
    """
    at: dict[int, Tensor] = {}
    starts = [begin for begin, _ in ranges]
    for (begin, end), part in zip(ranges, parts, strict=True):
        if part.numel() != end - begin:
            raise WeightSyncError(f"a bucket of {end - begin} bytes came with {part.numel()}")
    for entry in layout.owners:
        if not entry.nbytes:
            at[entry.offset] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        first = int(np.searchsorted(starts, entry.offset, side="right")) - 1
        if entry.end <= ranges[first][1]:
            at[entry.offset] = entry.view(parts[first], ranges[first][0])
            continue
        last = int(np.searchsorted(starts, entry.end, side="left"))
        joined = _joined(parts[first:last], pool)
        at[entry.offset] = joined.view(entry.dtype).view(entry.shape)
    return {entry.name: at[entry.offset] for entry in layout.entries}


def _joined(parts: Sequence[Tensor], pool: HostPool) -> Tensor:
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    memory = pool.take(sum(part.numel() for part in parts))
    torch.cat(list(parts), out=memory)
    return memory
