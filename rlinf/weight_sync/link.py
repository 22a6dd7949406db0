"""The messages between a sender and the receivers that it serves.

A receiver asks, the sender waits until all have asked, then it answers with a header and parts.
Every question has a ticket and every answer repeats it, so that what an interrupted update left
behind is not taken for the next one. A receiver whose wait fails withdraws its question.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.process import require_process
from rlinf.weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlinf.scheduler.worker import Worker

Targets = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]
Ticket = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Parties:
    """The two groups of a synchronisation, by name, and how many ranks each has, from 0.

    All sending ranks have equal weights; receiver r is served by rank r modulo ``senders``.
    """

    sender: str
    receiver: str
    receivers: int
    senders: int = 1

    def served_by(self, sender_rank: int) -> list[int]:
        """Ranks of the receivers that a sending rank serves."""
        if sender_rank >= self.senders:
            return []
        return list(range(sender_rank, self.receivers, self.senders))

    def sender_of(self, receiver_rank: int) -> int:
        """Rank of the sender that serves a receiver."""
        return receiver_rank % self.senders


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs."""

    node: int
    process: int
    in_process: bool  # whether messages within the process are passed by reference

    @classmethod
    def here(cls, worker: Worker) -> Place:
        """The place of this process."""
        local = require_process().runtime == "local"
        return cls(node=worker.worker_info.cluster_node_rank, process=os.getpid(), in_process=local)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A receiver asks for weights."""

    rank: int
    ticket: Ticket  # repeated by the answer
    place: Place
    base: Any  # snapshot that its weights equal; None: any other weights
    targets: Targets  # shapes and types of its tensors; of others it takes what comes


@dataclass(frozen=True)
class Withdrawal:
    """A receiver waits for the answer to its last question no longer."""


@dataclass(frozen=True)
class Confirmation:
    """A receiver looks at the update no longer."""


@dataclass(frozen=True)
class Header:
    """An update begins, or is given up."""

    tickets: Mapping[int, Ticket]
    version: int
    body: Any
    given_up: str = ""  # why


@dataclass(frozen=True)
class Part:
    """More of an update."""

    body: Any


class SenderLink:
    """The sender's end."""

    def __init__(self, worker: Worker, parties: Parties) -> None:
        self.worker, self.parties = worker, parties
        self.tickets: dict[int, Ticket] = {}
        self.rank = worker.worker_info.rank
        self.receivers = parties.served_by(self.rank)
        self._asked: dict[int, Request] = {}  # by receiver, read and not answered

    def requests(self) -> list[Request]:
        """Wait until every receiver has asked; a SchedulerError where one died or is too late."""
        before: dict[int, Request] | None = None
        # While one is waited for, others may withdraw, and ask anew.
        while before != self._asked or len(self._asked) < len(self.receivers):
            before = dict(self._asked)
            for rank in self.receivers:
                self._read_questions(rank)
        asked, self._asked = [self._asked[rank] for rank in self.receivers], {}
        self.tickets = {request.rank: request.ticket for request in asked}
        return asked

    def _read_questions(self, rank: int) -> None:
        """Up to one that nothing follows yet, such as a withdrawal."""
        receiver = self.parties.receiver
        while True:
            if rank not in self._asked:
                message = self.worker.recv(receiver, rank)
            elif (message := self.worker.recv(receiver, rank, async_op=True).take_now()) is None:
                return
            self._note(rank, message)

    def _note(self, rank: int, message: Any) -> None:
        """Take a message of a receiver between two updates."""
        if isinstance(message, Request):
            self._asked[rank] = message
        elif isinstance(message, Withdrawal):
            self._asked.pop(rank, None)

    def header(self, version: int, body: Any) -> None:
        """Begin an update."""
        self._tell(Header(self.tickets, version, body))

    def part(self, body: Any) -> None:
        """Go on with it."""
        self._tell(Part(body))

    def abort(self, version: int, error: BaseException) -> None:
        """Tell the receivers that the update will not be completed."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(SchedulerError):  # a dead receiver needs no message
            why = f"the sender gave up version {version}: {reason}"
            self._tell(Header(self.tickets, version, None, why))

    def confirmations(self) -> None:
        """Wait until every receiver has confirmed; a WeightSyncError where one has not waited."""
        for rank in self.receivers:
            message = self.worker.recv(self.parties.receiver, rank)
            if not isinstance(message, Confirmation):
                self._note(rank, message)
                raise WeightSyncError(f"receiver {rank} has not waited for the update")

    def alive(self, receiver: int) -> bool:
        """Whether a receiver lives."""
        return self.worker.check_worker_alive(f"{self.parties.receiver}:{receiver}")

    def _tell(self, message: Header | Part) -> None:
        if self.receivers:
            source = (self.parties.sender, self.rank)
            members = [source, (self.parties.receiver, self.receivers)]
            # What goes wrong on the way is told by the confirmations, which do not come.
            self.worker.broadcast(message, groups=members, src=source, async_op=True)


class ReceiverLink:
    """A receiver's end: ``index`` is its place among the ``peers`` that its sender serves."""

    def __init__(self, worker: Worker, parties: Parties) -> None:
        self._worker, self._parties = worker, parties
        self.rank = worker.worker_info.rank
        self._sender = parties.sender_of(self.rank)
        self.sender_name = f"{parties.sender}:{self._sender}"
        self.peers = parties.served_by(self._sender)
        self.index = self.peers.index(self.rank)
        self._ticket = secrets.token_hex(4), 0

    def ask(self, base: Any, targets: Targets) -> None:
        """Ask for weights."""
        self._ticket = self._ticket[0], self._ticket[1] + 1
        request = Request(
            rank=self.rank,
            ticket=self._ticket,
            place=Place.here(self._worker),
            base=base,
            targets=targets,
        )
        self._worker.send(request, self._parties.sender, self._sender)

    def header(self) -> Header:
        """The beginning of the update that was asked for; older messages are dropped."""
        while True:
            message = self._next()
            if isinstance(message, Part):
                continue
            # Without tickets it is for anyone.
            if message.tickets and message.tickets.get(self.rank) != self._ticket:
                continue
            if message.given_up:
                raise WeightSyncError(message.given_up)
            return message

    def part(self) -> Any:
        """What comes next of the update; raises as :meth:`header`."""
        message = self._next()
        if isinstance(message, Part):
            return message.body
        another = "another update began before this one was complete"
        raise WeightSyncError(message.given_up or another)

    def confirm(self) -> None:
        """Tell the sender that this receiver is done."""
        self._worker.send(Confirmation(), self._parties.sender, self._sender)

    def withdraw(self) -> None:
        """Tell the sender that this receiver waits no longer."""
        with contextlib.suppress(SchedulerError):  # a dead sender needs no message
            self._worker.send(Withdrawal(), self._parties.sender, self._sender)

    def _next(self) -> Header | Part:
        source = (self._parties.sender, self._sender)
        message: Header | Part = self._worker.broadcast(
            None, groups=[source, (self._parties.receiver, self.peers)], src=source
        )
        return message


def agreed_dtypes(
    weights: Mapping[str, Tensor], requests: Iterable[Request]
) -> dict[str, torch.dtype]:
    """Types that the receivers want, by name.

    Raises:
        WeightSyncError: A receiver's tensor has another shape, or two receivers want two types.
    """
    found: dict[str, torch.dtype] = {}
    for request in requests:
        for name, (shape, dtype) in request.targets.items():
            if name not in weights:
                continue  # whoever loads the weights knows whether one may be missing
            if tuple(weights[name].shape) != shape:
                raise WeightSyncError(
                    f"{name} has shape {list(weights[name].shape)} at the sender and "
                    f"{list(shape)} at receiver {request.rank}"
                )
            if found.setdefault(name, dtype) != dtype:
                raise WeightSyncError(
                    f"receiver {request.rank} wants {name} as {dtype} and another receiver as "
                    f"{found[name]}; give all receivers one type"
                )
    return found
