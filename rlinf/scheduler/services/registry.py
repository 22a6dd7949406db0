"""Names of the cluster: workers, groups, channels, and who is alive. Lives in the driver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlinf.config.nearest import did_you_mean
from rlinf.scheduler.address import SlowLinks, WorkerInfo
from rlinf.scheduler.errors import (
    NameTakenError,
    SchedulerError,
    SchedulerValueError,
    WorkerDiedError,
)
from rlinf.scheduler.process import Process
from rlinf.scheduler.services.diagnosis import ask_everyone
from rlinf.scheduler.services.leases import LeaseService
from rlinf.scheduler.services.network import Network, NetworkService
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.endpoint import Endpoint, Reply, all_done, try_fail, try_resolve

if TYPE_CHECKING:
    from rlinf.scheduler.runtime.launch import Launch

log = logging.getLogger(__name__)

_SILENT_SECONDS = 5.0  # after which a process that does not answer is not waited for
_UNKNOWN_SECONDS = 10.0  # after which a name that is waited for may well be misspelt


@dataclass
class _WorkerRecord:
    info: WorkerInfo
    launch: Launch | None = None
    address: str | None = None
    ended: bool = False
    waiting: list[Future[Reply]] = field(default_factory=list)


@dataclass(frozen=True)
class GroupRecord:
    """A worker group that is alive: names of its workers, and their nodes, in order of rank.

    The incarnation tells it from an earlier group of the same name.
    """

    name: str
    class_name: str
    worker_names: tuple[str, ...]
    incarnation: str
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class ChannelRecord:
    """A channel that exists."""

    name: str
    maxsize: int  # most items per key, 0 for any number
    hosts: dict[int, str]  # endpoints by node; that of the lowest hosts what others do not
    distributed: bool  # whether a key lives on the node of the worker that uses it first
    worker: str | None = None  # that hosts it

    @property
    def main_host(self) -> str:
        """Host of every key of a channel that is not distributed."""
        return self.hosts[min(self.hosts)]


@dataclass
class _Channel:
    """A channel, and the answers of its hosts to that they open it."""

    record: ChannelRecord
    opening: list[Future[Reply]] = field(default_factory=list)


class RegistryService:
    """The one table of names; ``on_death`` is called with a worker that is gone for good."""

    def __init__(self, endpoint: Endpoint, on_death: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._on_death = on_death
        self.on_start: Callable[[str, str], object] = lambda name, address: None
        self._workers: dict[str, _WorkerRecord] = {}
        self._unknown: dict[str, list[Future[Reply]]] = {}
        self._sought: dict[str, threading.Timer] = {}
        self._dead: dict[str, str] = {}
        self._groups: dict[str, GroupRecord] = {}
        self._channels: dict[str, _Channel] = {}
        self._ports: dict[tuple[int, int], str] = {}
        self._pins: dict[tuple[str, Hashable], str] = {}
        for name in (
            "add_group", "remove_group", "group", "register", "lookup", "refuse_stranger", "info",
            "started", "launch", "take_port", "add_channel", "channel", "remove_channel", "pin",
            "alive",
        ):  # fmt: skip
            endpoint.register(f"registry.{name}", getattr(self, name))

    def add_group(self, group: GroupRecord, launches: list[Launch]) -> Future[Reply] | None:
        """Announce a group before its processes are up.

        Where workers of these names had died the answer comes once every process knows that they
        are new ones: calls of workers come by another way, and could be earlier.

        Raises:
            NameTakenError: A group of that name is alive.
        """
        other = self._groups.get(group.name)
        if other is not None and any(worker in self._workers for worker in other.worker_names):
            raise NameTakenError(
                f"worker group name '{group.name}' is taken by a running group of "
                f"{len(other.worker_names)} {other.class_name} worker(s). Close that group first "
                "or launch with another name."
            )
        self._groups[group.name] = group
        told: list[Future[Reply]] = []
        for launch in launches:
            name = launch.name
            if self._dead.pop(name, None) is not None:
                told += self._ask_everyone("mail.forget", name)
            waiting = self._unknown.pop(name, [])
            self._workers[name] = _WorkerRecord(launch.info, launch, waiting=waiting)
        return all_done(told, _SILENT_SECONDS) if told else None

    def remove_group(self, name: str, incarnation: str) -> None:
        """Forget a group that was closed, unless it is gone, whatever has its name now; whoever
        waits for its workers gets an error."""
        group = self._groups.get(name)
        if group is None or group.incarnation != incarnation:
            return
        del self._groups[name]
        for worker in group.worker_names:
            self.died(worker, f"its group '{name}' was closed")
        for child in [each for each in self._workers if each.startswith(f"{name}:")]:
            self._release(child)
            del self._workers[child]

    def group(self, name: str) -> GroupRecord | None:
        """A group that is alive."""
        return self._groups.get(name)

    def register(
        self, name: str, address: str, info: WorkerInfo, incarnation: str
    ) -> Future[Reply] | None:
        """A worker's process is up and reachable. It is told which workers died before, and a child
        that takes the place of another one is made known, before the answer.

        Raises:
            WorkerDiedError: The group that it was started for was closed meanwhile.
        """
        group = self._groups.get(info.address.root_group_name)
        if group is None or group.incarnation != incarnation:
            raise WorkerDiedError(f"worker '{name}' is up after its group was closed")
        record, told = self._workers.get(name), []
        if record is None:
            record = self._workers[name] = _WorkerRecord(info, waiting=self._unknown.pop(name, []))
        elif record.address is not None and not record.ended:  # it may have, unnoticed as yet
            told = self._leave(name)
        record.address, record.ended = address, False
        self.on_start(name, address)
        for future in record.waiting:
            try_resolve(future, Reply(address))
        record.waiting.clear()
        if address != self._endpoint.address:
            # Not by the answer: what is told of one that is launched again could be earlier.
            for worker, cause in self._dead.items():
                self._endpoint.request(address, "mail.dead", worker, cause)
        return all_done(told, _SILENT_SECONDS) if told else None

    def lookup(self, name: str) -> Future[Reply] | str:
        """Endpoint of a worker, as soon as it is up; of a child that has ended, of its next one."""
        if name in self._dead:
            raise WorkerDiedError(f"worker '{name}' died: {self._dead[name]}")
        record = self._workers.get(name)
        self.refuse_stranger(name)
        if record is not None and record.address is not None and not record.ended:
            return record.address
        future: Future[Reply] = Future()
        waiting = record.waiting if record else self._unknown.setdefault(name, [])
        waiting.append(future)
        return future

    def refuse_stranger(self, name: str) -> None:
        """Refuse, by a SchedulerValueError, a rank that a running group does not have. A group that
        there is not may come: a warning tells of one that is not launched soon."""
        group, _, rank = name.partition(":")
        known = name in self._workers or name in self._dead
        if not known and group not in self._groups and group not in self._sought:
            timer = threading.Timer(_UNKNOWN_SECONDS, self._tell_unknown, (group, name))
            timer.daemon, self._sought[group] = True, timer
            timer.start()
        if not known and group in self._groups and rank.isdecimal():
            raise SchedulerValueError(
                f"there is no worker '{name}': group '{group}' has ranks "
                f"0-{len(self._groups[group].worker_names) - 1}"
            )

    def _tell_unknown(self, group: str, name: str) -> None:
        if group not in self._groups and name not in self._workers:
            log.warning(
                "worker %s is waited for, and there is no group %s: the wait ends when one of that "
                "name is launched; %s",
                name, group, did_you_mean(group, list(self._groups)),
            )  # fmt: skip

    def close(self) -> None:
        """Tell of nobody any more."""
        for timer in self._sought.values():
            timer.cancel()

    def info(self, name: str) -> WorkerInfo | None:
        """What is known of a worker, None for an unknown one."""
        record = self._workers.get(name)
        return record.info if record else None

    def launch(self, name: str) -> Launch | None:
        """How a worker that is alive was launched."""
        record = self._workers.get(name)
        return record.launch if record else None

    def take_port(self, node_rank: int, port: int, worker: str) -> bool:
        """Claim a port of a node for a worker's life; False if it is claimed already."""
        if (node_rank, port) in self._ports:
            return False
        self._ports[node_rank, port] = worker
        return True

    def started(self, name: str) -> bool:
        """Whether a worker's process is up."""
        record = self._workers.get(name)
        return record is not None and record.address is not None

    def died(self, name: str, cause: str) -> None:
        """A worker is gone: free what it held and tell everyone."""
        record = self._workers.pop(name, None)
        if record is None:
            return
        self._dead[name] = cause
        for future in record.waiting:
            try_fail(future, WorkerDiedError(f"worker '{name}' died: {cause}"))
        self._release(name)
        for channel in [each for each in self._channels.values() if each.record.worker == name]:
            self.remove_channel(channel.record.name)
            if record.address == self._endpoint.address:  # it was no process of its own
                reason = f"worker '{name}' died: {cause}"
                close = (channel.record.name, reason, WorkerDiedError)
                self._endpoint.request(record.address, "channel.close", *close)
        for address in self.endpoints():
            # No answer is waited for: some may have died themselves, not yet known to have.
            self._endpoint.request(address, "mail.dead", name, cause, record.address)

    def left(self, name: str, address: str) -> None:
        """The process of a child of a worker has ended, and answers no more. Those who need it hear
        of it from its parent; what it has sent may still be on its way to them."""
        if self.runs_at(name, address):
            self._workers[name].ended = True
            self._leave(name)

    def _leave(self, name: str) -> list[Future[Reply]]:
        self._release(name)
        return self._ask_everyone("mail.left", name)

    def _release(self, name: str) -> None:
        """Free what a worker held."""
        self._on_death(name)
        self._ports = {port: owner for port, owner in self._ports.items() if owner != name}

    def _ask_everyone(self, kind: str, name: str) -> list[Future[Reply]]:
        asked = []
        for address in self.endpoints():
            with suppress(WorkerDiedError):
                asked.append(self._endpoint.request(address, kind, name))
        return asked

    def alive(self, name: str) -> bool:
        """Whether a worker has been launched, and has not ended as far as is known."""
        return name in self._workers and not self._workers[name].ended

    def runs(self, launch: Launch) -> bool:
        """Whether the worker of this launch has not ended, as far as is known."""
        record = self._workers.get(launch.name)
        return record is not None and record.launch == launch

    def runs_at(self, name: str, address: str) -> bool:
        """Whether a worker lives and is the one at this endpoint, not a later one of its name."""
        record = self._workers.get(name)
        return record is not None and record.address == address

    def endpoints(self) -> dict[str, list[str]]:
        """Every endpoint that may answer, with the workers behind it."""
        table: dict[str, list[str]] = {self._endpoint.address: []}
        for name, record in self._workers.items():
            if record.address is not None and not record.ended:
                table.setdefault(record.address, []).append(name)
        return table

    def add_channel(self, record: ChannelRecord) -> Future[Reply]:
        """Open a channel at its hosts; an existing one of that name wins. The answer, once it is
        open, is its record and whether it is new."""
        channel = self._channels.get(record.name)
        new = channel is None
        if channel is None:
            channel = self._channels[record.name] = _Channel(record)
            channel.opening = [
                self._endpoint.request(address, "channel.open", record.name, record.maxsize)
                for address in set(record.hosts.values())
            ]
        return self._once_open(channel, (channel.record, new))

    def channel(self, name: str) -> Future[Reply] | None:
        """The record of a channel, once it is open; None if there is none."""
        channel = self._channels.get(name)
        return None if channel is None else self._once_open(channel, channel.record)

    def _once_open(self, channel: _Channel, answer: Any) -> Future[Reply]:
        future: Future[Reply] = Future()

        def opened(_: object = None) -> None:
            errors = [each.exception() for each in channel.opening if each.done()]
            if error := next(filter(None, errors), None):
                if self._channels.get(channel.record.name) is channel:
                    self.remove_channel(channel.record.name)
                try_fail(future, error)
            else:
                try_resolve(future, Reply(answer))

        if all(each.done() for each in channel.opening):
            opened()
        else:  # who does not answer answers a put no sooner
            all_done(channel.opening, _SILENT_SECONDS).add_done_callback(opened)
        return future

    def remove_channel(self, name: str) -> None:
        """Free the name of a channel."""
        self._channels.pop(name, None)
        for pin in [pin for pin in self._pins if pin[0] == name]:
            del self._pins[pin]

    def pin(self, name: str, key: Hashable, node_rank: int) -> str:
        """Host of a key of a distributed channel: that of the node which asks first."""
        if name not in self._channels:
            raise SchedulerError(f"there is no channel '{name}'")
        record = self._channels[name].record
        host = record.hosts.get(node_rank, record.main_host)
        return self._pins.setdefault((name, key), host)


class DriverServices:
    """Registry, leases, diagnosis and, where they are wanted, timeline and imagined network."""

    def __init__(
        self, process: Process, tracer: Tracer | None, slow_links: SlowLinks | None
    ) -> None:
        endpoint = process.endpoint
        self.leases = LeaseService(endpoint, process.mailbox.check_alive)
        self.registry = RegistryService(endpoint, self.leases.release_holder)
        endpoint.register(
            "diagnosis.report", lambda: ask_everyone(endpoint, self.registry.endpoints())
        )
        self._tracer = tracer
        if self._tracer is not None:
            endpoint.register("trace.record", self._tracer.record_all)
            Tracer.enable(self._tracer.record_all)
        self._network = None if slow_links is None else NetworkService(endpoint, slow_links)
        if self._network is not None:
            process.network = Network(process)

    def close(self) -> None:
        """Write the timeline out."""
        self.registry.close()
        if self._network is not None:
            self._network.close()
        if self._tracer is not None:
            Tracer.disable()
            self._tracer.finalize()
