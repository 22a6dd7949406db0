"""Broadcasts by a collective library of torch, among one sender and its receivers.

``gloo`` moves CPU memory and is tested. **Not run**: ``nccl``, which moves device memory and was
written without an accelerator at hand; its test carries the marker ``gpu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from rlinf.scheduler.process import own_device, require_process
from rlinf.scheduler.transport.rendezvous import meet, open_place
from rlinf.weight_sync.errors import WeightSyncError

Backend = Literal["gloo", "nccl"]


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
    """One member of ``size``; rank 0 is the sender."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.meeting, self._rank, self._size = meeting, rank, size
        self._group: Any = None
        self.device = torch.device("cpu" if meeting.backend == "gloo" else own_device())

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
