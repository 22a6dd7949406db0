"""``shared_memory``: one block on the node, used again for every update.

A send copies the weights into the block, casting on the way, and does not wait for receivers (after
the first, which waits until they are there). A receive takes the newest version, and a receiver may
look for a newer one at any time, without the sender: :meth:`SharedMemoryReceiver.latest`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rlinf.processes.byte_layout import ByteLayout, lay_out
from rlinf.scheduler.process import require_process
from rlinf.scheduler.transport.cluster_files import ClusterFiles, shared_memory_directory
from rlinf.weight_sync.config import SharedMemoryConfig
from rlinf.weight_sync.double_buffer import MOST_READERS, BlockReader, BlockWriter
from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.link import Header, Place, Request, agreed_dtypes
from rlinf.weight_sync.protocol import ReceivedWeights, Sent, WeightReceiver, WeightSender


class SharedMemorySender(WeightSender[SharedMemoryConfig]):
    """Publishes updates in its block."""

    _first: list[Request] | None = None
    _writer: BlockWriter | None = None
    _previous: BlockWriter | None = None
    takes_host_tensors = True

    def _requests(self) -> list[Request]:
        """What receivers asked for at first; later they only look."""
        if self._first is None:
            self._first = self._link.requests()
            self._link.tickets = {}  # from now on nobody asks
        return self._first

    def reserve(self, weights: Mapping[str, Tensor], requests: list[Request]) -> None:
        """Take the memory for weights like these ahead of their update.

        Raises:
            NoSharedMemoryError: There is not so much.
            WeightSyncError: The receivers want them in other shapes.
        """
        self._writer_for(lay_out(weights, agreed_dtypes(weights, requests)))

    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent:
        own = Place.here(self._worker)
        away = [request.rank for request in requests if request.place.node != own.node]
        if away or len(requests) > MOST_READERS:
            raise WeightSyncError(
                f"shared memory reaches {MOST_READERS} receivers on the node of the sender, and "
                f"{f'receivers {away} are on others' if away else f'there are {len(requests)}'}; "
                "nearest: weight_sync.type=bucket, or patch"
            )
        layout = lay_out(weights, agreed_dtypes(weights, requests))
        writer = self._writer_for(layout)
        receivers = self._link.receivers
        with writer.writing(
            version,
            seconds=require_process().deadline_seconds,
            alive=lambda index: self._link.alive(receivers[index]),
        ) as tensors:
            for entry in layout.owners:
                tensors[entry.name].copy_(weights[entry.name])
        self._link.header(version, (writer.path, layout))
        return Sent(version=version, kind="shared_memory", nbytes=layout.nbytes)

    def _writer_for(self, layout: ByteLayout) -> BlockWriter:
        old = self._writer
        if old is not None and old.layout == layout:
            return old
        if self._previous is not None:
            self._previous.close()
        self._previous = old  # a receiver may only now be about to open it
        self._writer = BlockWriter(layout, self._path(), old.published if old else 0)
        return self._writer

    def _path(self) -> Path | None:
        """A file that goes with the cluster; within one process no name is needed."""
        if require_process().runtime == "local" and hasattr(os, "memfd_create"):
            return None
        prefix = ClusterFiles(self._worker._rlinf_launch.membership.token).block_prefix
        return shared_memory_directory() / f"{prefix}weights-{secrets.token_hex(4)}"

    def close(self) -> None:
        """Remove the block; receivers keep what they have mapped."""
        for writer in (self._writer, self._previous):
            if writer is not None:
                writer.close()
        self._writer = self._previous = None


class SharedMemoryReceiver(WeightReceiver[SharedMemoryConfig]):
    """Reads the newest update in the sender's block."""

    _reader: BlockReader | None = None
    _path: Path | None = None
    _update = 0
    _asked = False

    def _open(self) -> Header:
        if not self._asked:
            self._ask()
            self._asked = True
        return self._link.header()

    def _withdraw(self) -> None:
        """Nothing: what is asked once holds for all updates."""

    def _receive(self, header: Header) -> ReceivedWeights:
        path, layout = header.body
        if self._reader is None or self._path != path:
            self._reader, self._path = BlockReader(path, self._link.index, layout), path
        return self._read(self._reader)

    def latest(self) -> ReceivedWeights | None:
        """The newest update, without waiting for the sender; None if this receiver has it.

        It is for a receiver that asks between two steps whether there is something new. The send
        of what was found here is still to be received.
        """
        if self._reader is None or self._reader.published == self._update:
            return None
        self.release()
        update = self._read(self._reader)
        self.version = update.version
        return update

    def _read(self, reader: BlockReader) -> ReceivedWeights:
        read = reader.copy if self._config.reads == "copy" else reader.view
        weights, version, self._update = read()
        return ReceivedWeights(weights, version)

    def release(self) -> None:
        """Let the sender overwrite what this receiver was looking at."""
        if self._reader is not None:
            self._reader.release()
