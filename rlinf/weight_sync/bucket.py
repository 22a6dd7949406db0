"""``bucket``: all weights, in flat buckets, to receivers on any node.

A bucket is a range of bytes of a layout, filled on one side and taken apart on the other.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from rlinf.processes.byte_layout import ByteLayout, Entry, flat_bytes, lay_out
from rlinf.scheduler.accelerators import collective_backend
from rlinf.scheduler.process import own_device, require_process
from rlinf.scheduler.transport.rendezvous import meet, open_place
from rlinf.weight_sync.config import BucketConfig
from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.link import Header, Request, agreed_dtypes
from rlinf.weight_sync.protocol import ReceivedWeights, Sent, WeightReceiver, WeightSender

Backend = Literal["gloo", "nccl"]
_ALONE_BYTES = 1 << 20
_MOST_ALONE = 128  # each becomes a memory mapping of the receiver

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """What the header of a whole update says."""

    layout: ByteLayout
    ranges: list[Range]  # what each bucket covers
    meeting: Meeting | None = None  # where the collective meets; None: buckets are messages


class BucketSender(WeightSender[BucketConfig]):
    """Sends flat buckets; tensors are cast while they are copied."""

    _pool: HostPool | None = None
    _pooled: list[Range] | None = None
    _scratch: Tensor | None = None
    _collective: Collective | None = None

    @property
    def takes_host_tensors(self) -> bool:
        """See :attr:`WeightSender.takes_host_tensors`; collectives may read a device."""
        return self._config.transport == "scheduler"

    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent:
        layout = lay_out(weights, agreed_dtypes(weights, requests))
        ranges = plan_buckets(layout, self._config.bucket_size)
        packer = Packer(layout, weights)
        if self._config.transport == "scheduler":
            self._link.header(version, Buckets(layout=layout, ranges=ranges))
            for flat in self._packed(packer, ranges):
                self._link.part(flat)
        else:
            self._send_collectively(packer, layout, ranges, version)
        nbytes = sum(end - begin for begin, end in ranges)
        return Sent(version=version, kind="bucket", nbytes=nbytes)

    def _packed(self, packer: Packer, ranges: list[Range]) -> Iterator[Tensor]:
        """Every bucket in memory that a message may refer to until the receiver drops it."""
        by_reference = require_process().runtime == "local"
        if by_reference and (self._pool is None or self._pooled != ranges):
            self._pool, self._pooled = HostPool(), ranges
        for bucket in ranges:
            if by_reference and self._pool is not None:
                flat = self._pool.take(bucket[1] - bucket[0])
                packer.fill(bucket, flat)
            else:  # the message holds a copy as soon as it is sent
                whole = packer.alone(bucket)
                flat = self._filled(packer, bucket) if whole is None else whole
            yield flat

    def _filled(self, packer: Packer, bucket: Range) -> Tensor:
        nbytes = bucket[1] - bucket[0]
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        flat = self._scratch[:nbytes]
        packer.fill(bucket, flat)
        return flat

    def _send_collectively(
        self, packer: Packer, layout: ByteLayout, ranges: list[Range], version: int
    ) -> None:
        if self._collective is None:
            members = 1 + len(self._link.receivers)
            self._collective = Collective(Meeting.at(self._config.transport), 0, members)
        collective = self._collective
        buckets = Buckets(layout=layout, ranges=ranges, meeting=collective.meeting)
        self._link.header(version, buckets)
        try:
            collective.open()
            for begin, end in ranges:
                flat = torch.empty(end - begin, dtype=torch.uint8, device=collective.device)
                packer.fill((begin, end), flat)
                collective.broadcast(flat)
        except BaseException:
            self.close()  # receivers in the middle of a broadcast see the connection end
            raise

    def close(self) -> None:
        """End the collective."""
        if self._collective is not None:
            self._collective.close()
            self._collective = None


class BucketReceiver(WeightReceiver[BucketConfig]):
    """Keeps the buckets until all have come; the tensors are views of them."""

    _collective: Collective | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pool = HostPool()

    def _receive(self, header: Header) -> ReceivedWeights:
        buckets: Buckets = header.body
        if buckets.meeting is None:
            parts = [self._link.part() for _ in buckets.ranges]
        else:
            parts = self._receive_collectively(buckets.ranges, buckets.meeting)
        weights = unpack(buckets.layout, buckets.ranges, parts, self._pool)
        return ReceivedWeights(weights, header.version)

    def _receive_collectively(self, ranges: list[Range], meeting: Meeting) -> list[Tensor]:
        if self._collective is None or self._collective.meeting != meeting:
            self.close()
            members = 1 + len(self._link.peers)
            self._collective = Collective(meeting, 1 + self._link.index, members)
        collective, parts = self._collective, []
        try:
            collective.open()
            for begin, end in ranges:
                if collective.device.type == "cpu":
                    flat = self._pool.take(end - begin)
                else:
                    flat = torch.empty(end - begin, dtype=torch.uint8, device=collective.device)
                collective.broadcast(flat)
                parts.append(flat)
        except BaseException:
            self.close()
            raise
        return parts

    def close(self) -> None:
        """End the collective."""
        super().close()
        if self._collective is not None:
            self._collective.close()
            self._collective = None


def plan_buckets(layout: ByteLayout, bucket_size: int) -> list[Range]:
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


class Packer:
    """Reads the buckets of one update out of the sender's tensors."""

    def __init__(self, layout: ByteLayout, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._owners = [entry for entry in layout.owners if entry.nbytes]
        self._offsets = [entry.offset for entry in self._owners]  # rising
        self._latest: tuple[str, Tensor] | None = None

    def alone(self, bucket: Range) -> Tensor | None:
        """[n] uint8 bytes of a bucket within one CPU tensor, by reference where it needs no cast.

        None where the bucket holds several tensors.
        """
        begin, end = bucket
        entries = self._entries_in(bucket)
        if len(entries) != 1:
            return None
        return self._bytes(entries[0])[begin - entries[0].offset : end - entries[0].offset]

    def fill(self, bucket: Range, flat: Tensor) -> None:
        """Copy a bucket into [n] uint8 memory, casting on the way."""
        begin, end = bucket
        for entry in self._entries_in(bucket):
            if begin <= entry.offset and entry.end <= end:
                entry.view(flat, begin).copy_(self._weights[entry.name])
            else:  # the bucket is a part of one tensor
                flat.copy_(self._bytes(entry)[begin - entry.offset : end - entry.offset])

    def _entries_in(self, bucket: Range) -> list[Entry]:
        """Entries that lie in a bucket, wholly or in part."""
        begin, end = bucket
        first = max(bisect.bisect_right(self._offsets, begin) - 1, 0)
        last = bisect.bisect_left(self._offsets, end)
        return [entry for entry in self._owners[first:last] if entry.end > begin]

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
    layout: ByteLayout, ranges: Sequence[Range], parts: Sequence[Tensor], pool: HostPool
) -> dict[str, Tensor]:
    """The tensors of an update: views of its buckets, or joined where one has several.

    Args:
        layout: Where tensors lie.
        ranges: What each bucket covers.
        parts: [n] uint8 bytes of each bucket.
        pool: Memory for joined tensors.

    Raises:
        WeightSyncError: A bucket has another length than its range.
    """
    for (begin, end), part in zip(ranges, parts, strict=True):
        if part.numel() != end - begin:
            raise WeightSyncError(f"a bucket of {end - begin} bytes came with {part.numel()}")
    at: dict[int, Tensor] = {}
    starts = [begin for begin, _ in ranges]
    for entry in layout.owners:
        if not entry.nbytes:
            at[entry.offset] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        first = bisect.bisect_right(starts, entry.offset) - 1
        if entry.end <= ranges[first][1]:
            at[entry.offset] = entry.view(parts[first], ranges[first][0])
            continue
        last = bisect.bisect_left(starts, entry.end)
        joined = _joined(parts[first:last], pool)
        at[entry.offset] = joined.view(entry.dtype).view(entry.shape)
    return {entry.name: at[entry.offset] for entry in layout.entries}


def _joined(parts: Sequence[Tensor], pool: HostPool) -> Tensor:
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    memory = pool.take(sum(part.numel() for part in parts))
    torch.cat(list(parts), out=memory)
    return memory


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the members of a collective find each other."""

    place: str  # at the sender, see `rlinf.scheduler.transport.rendezvous.open_place`
    backend: Backend
    seconds: float  # that an operation may take

    @classmethod
    def at(cls, backend: Any) -> Meeting:
        """A meeting at the sender; a WeightSyncError where workers are threads of one process."""
        process = require_process()
        if process.runtime == "local":
            raise WeightSyncError(
                f"transport {backend} needs every worker in an own process, and the runtime is "
                "local; use transport scheduler, or cluster.runtime ray"
            )
        return cls(place=open_place(), backend=backend, seconds=process.deadline_seconds)


class Collective:
    """One member of a broadcast by torch's collectives among ``size``; rank 0 is the sender.

    ``gloo`` moves CPU memory and is tested. **Not run**: ``nccl``, which moves device memory and
    was written without an accelerator at hand; its test carries the marker ``gpu``.
    """

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.meeting, self._rank, self._size = meeting, rank, size
        self._group: Any = None
        self.device = torch.device("cpu" if meeting.backend == "gloo" else own_device())
        if meeting.backend != "gloo" and collective_backend(str(self.device)) != meeting.backend:
            raise WeightSyncError(
                f"transport {meeting.backend} needs devices of that library, and this worker "
                f"computes on {self.device}; use transport scheduler, or gloo"
            )

    def open(self) -> None:
        """Meet the others, once; a WeightSyncError where not all came in time."""
        if self._group is not None:
            return
        library: Any = torch.distributed
        meeting = self.meeting
        timeout = timedelta(seconds=meeting.seconds)
        try:
            store = meet(meeting.place, meeting.seconds)
            kind = library.ProcessGroupGloo if meeting.backend == "gloo" else _nccl
            self._group = kind(store, self._rank, self._size, timeout)
        except RuntimeError as error:
            raise WeightSyncError(
                f"the {meeting.backend} collective did not meet: {error}"
            ) from error

    def broadcast(self, flat: Tensor) -> None:
        """Send or receive [n] uint8 memory; a WeightSyncError where a member is gone or late."""
        try:
            self._group.broadcast(flat, 0).wait()
            if flat.device.type != "cpu":
                torch.accelerator.current_stream(flat.device).synchronize()
        except RuntimeError as error:
            raise WeightSyncError(
                f"the {self.meeting.backend} broadcast failed: {error}"
            ) from error

    def close(self) -> None:
        """Leave; others in the middle of a broadcast fail."""
        self._group = None


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    library: Any = torch.distributed
    options = library.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return library.ProcessGroupNCCL(store, rank, size, options)
