"""``bucket``: all weights, in flat buckets, to receivers on any node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.scheduler.process import require_process
from rlinf.weight_sync.buckets import HostPool, Packer, Range, plan_buckets, unpack
from rlinf.weight_sync.collective import Collective, Meeting
from rlinf.weight_sync.config import BucketConfig
from rlinf.weight_sync.layout import Layout, agreed_dtypes, lay_out
from rlinf.weight_sync.link import Header, Request
from rlinf.weight_sync.protocol import Sent, Update, WeightReceiver, WeightSender


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """What the header of a whole update says.

    Args:
        layout: Where the tensors lie.
        ranges: What each bucket covers.
        meeting: Where the collective meets; None: buckets are messages.
    """

    layout: Layout
    ranges: list[Range]
    meeting: Meeting | None = None


class BucketSender(WeightSender[BucketConfig]):
    """Sends flat buckets; tensors are cast while they are copied."""

    _pool: HostPool | None = None
    _pooled: list[Range] | None = None
    _scratch: Tensor | None = None
    _collective: Collective | None = None

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
            nbytes = bucket[1] - bucket[0]
            if by_reference and self._pool is not None:
                flat = self._pool.take(nbytes)
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
        self, packer: Packer, layout: Layout, ranges: list[Range], version: int
    ) -> None:
        members = 1 + len(self._link.receivers)
        if self._collective is None:
            self._collective = Collective(Meeting.at(self._config.transport), 0, members)
        collective = self._collective
        self._link.header(
            version, Buckets(layout=layout, ranges=ranges, meeting=collective.meeting)
        )
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

    def _receive(self, header: Header) -> Update:
        buckets: Buckets = header.body
        if buckets.meeting is None:
            parts = [self._link.part() for _ in buckets.ranges]
        else:
            parts = self._receive_collectively(buckets.ranges, buckets.meeting)
        return Update(unpack(buckets.layout, buckets.ranges, parts, self._pool), header.version)

    def _receive_collectively(self, ranges: list[Range], meeting: Meeting) -> list[Tensor]:
        if self._collective is None or self._collective.meeting != meeting:
            self.close()
            members = 1 + self._link.peers
            self._collective = Collective(meeting, 1 + self._link.index, members)
        collective = self._collective
        parts = []
        try:
            collective.open()
            for begin, end in ranges:
                flat = self._memory(end - begin, collective.device)
                collective.broadcast(flat)
                parts.append(flat)
        except BaseException:
            self.close()
            raise
        return parts

    def _memory(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._pool.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """End the collective."""
        super().close()
        if self._collective is not None:
            self._collective.close()
            self._collective = None
