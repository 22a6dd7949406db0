"""The ray runtime: every worker is a Ray actor, on this machine and others."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.experimental import internal_kv

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.cluster_launch import start_group
from rlinf.scheduler.errors import (
    SchedulerError,
    SchedulerUsageError,
    SchedulerValueError,
    WorkerDiedError,
)
from rlinf.scheduler.placement import NodePlacementStrategy
from rlinf.scheduler.process import current_process, set_process
from rlinf.scheduler.runtime.attach import (
    ATTACH_VARIABLE,
    ChannelHost,
    enter_cluster,
    enter_from_environment,
)
from rlinf.scheduler.runtime.launch import Arguments, Launch, Membership
from rlinf.scheduler.runtime.ray_actors import RayClientRuntime, RayWorker
from rlinf.scheduler.runtime.ray_nodes import find_nodes
from rlinf.scheduler.runtime.ray_start import (
    ADDRESS_VARIABLE,
    NAMESPACE,
    connect,
    control_ended,
    control_lost,
    control_process,
    end_without_control,
    holding_signals,
    join,
    join_address,
)
from rlinf.scheduler.transport.blocks import EndedProcesses
from rlinf.scheduler.transport.cluster_files import ClusterFiles
from rlinf.scheduler.transport.sockets import process_at

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.services.registry import RegistryService

__all__ = ["RayClientRuntime", "RayRuntime", "attach_to_running"]

log = logging.getLogger(__name__)
_KV_SPACE = b"RLinf"
_ANSWER_SECONDS = 2.0
_MOST_NAMESPACES = 1000
_LOOK_SECONDS = 2.0  # between two looks at a worker of another node


class RayRuntime(RayClientRuntime):
    """Starts or joins Ray and runs workers as actors; the driver's runtime.

    ``all_nodes`` uses every node that is connected instead of ``config.num_nodes``.
    """

    def __init__(
        self, config: ClusterConfig, deadline_seconds: float, *, all_nodes: bool = False
    ) -> None:
        if ray.is_initialized():
            raise SchedulerUsageError(
                "Ray is initialised already. Create the Cluster before anything calls ray.init(): "
                "it sets Ray's name space and logging."
            )
        connect(config)
        self._own_node = own_id = ray.get_runtime_context().get_node_id()
        self._program = {"node_id": own_id, "pid": os.getpid()}
        self._files: ClusterFiles | None = None
        self._ended_here: EndedProcesses | None = None
        self._registry: RegistryService | None = None
        self._channel_nodes: set[int] = set()
        self._ended = threading.Event()
        self._watchers: list[threading.Thread] = []
        try:
            nodes = find_nodes(config, deadline_seconds, all_nodes)
            self._files = ClusterFiles.create()
            token, namespace = self._files.token, _claim_namespace(self._program)
            own_rank = next(node.node_rank for node in nodes if node.ray_id == own_id)
            self._ended_here = EndedProcesses(self._files, own_rank)
            several = len(nodes) > 1
            network_ips = {node.node_rank: node.node_ip for node in nodes} if several else {}
            process = enter_cluster(
                Membership(token, None, own_rank, network_ips.get(own_rank), deadline_seconds)
            )
            super().__init__(process, nodes, token, namespace, network_ips)
        except BaseException:
            self.shutdown()
            raise
        entry = {
            **self._program,
            "token": token,
            "driver": process.driver,
            "deadline_seconds": deadline_seconds,
            "nodes": {node.ray_id: node.node_rank for node in nodes},
            "network_ips": network_ips,
        }
        internal_kv._internal_kv_put(
            namespace.encode(), json.dumps(entry).encode(), namespace=_KV_SPACE
        )
        if (control := control_process()) is not None:
            threading.Thread(target=self._watch_control, args=(control,), daemon=True).start()

    def channel_hosts(self, cluster: Cluster, nodes: Sequence[int]) -> dict[int, str | None]:
        """Workers that host channels on these nodes; None where the driver does."""
        hosts: dict[int, str | None] = dict.fromkeys(nodes)
        for node in hosts:
            name = f"ChannelWorker_node{node}"
            if node == self.process.node_rank:
                continue
            if node not in self._channel_nodes:
                self._channel_nodes.add(node)
                start_group(cluster, name, ChannelHost, NodePlacementStrategy([node]), log=False)
            hosts[node] = f"{name}:0"
        return hosts

    def watch_deaths(self, registry: RegistryService) -> None:
        """Tell the registry when a worker's process ends, promptly and without messages."""
        self._registry = registry

        def watch(name: str, address: str) -> None:
            group = registry.group(name.partition(":")[0])
            if group is None:
                return
            node, pid = process_at(address)
            if self._ended_here is not None and node == self.process.node_rank:
                self._ended_here.discard(pid)
            if name in group.worker_names:
                job = partial(self._watch, registry, name, group.incarnation, address)
            else:
                job = partial(self._watch_child, registry, name, address)
            thread = threading.Thread(target=job, daemon=True)
            thread.start()
            self._watchers = [each for each in self._watchers if each.is_alive()] + [thread]

        registry.on_start = watch

    def start(
        self, launch: Launch, worker_class: type, arguments: Arguments, max_concurrency: int | None
    ) -> RayWorker:
        """Start one actor without waiting for it; a failed call tells the registry of its end."""
        worker = super().start(launch, worker_class, arguments, max_concurrency)

        def died(cause: str) -> None:
            with self.process.endpoint.lock:
                registry = None if self._ended.is_set() else self._registry
                if registry is not None and registry.runs(launch):
                    registry.died(launch.name, cause)

        worker.on_death = died
        return worker

    def _watch(self, registry: RegistryService, name: str, incarnation: str, address: str) -> None:
        """Wait for the end of a worker: of one on this node the kernel tells, of others Ray."""
        node, pid = process_at(address)
        near = node == self.process.node_rank
        cause: str | None = None

        def lives() -> bool:
            return registry.runs_at(name, address) and not self._ended.is_set()

        with suppress(SchedulerValueError):  # it ended, and Ray has forgotten it
            worker = self.find(name, incarnation)
            if near:
                self._wait_for_end(pid)
            while lives() and cause is None:
                cause = worker.cause_of_death()
                if near:
                    break
                if cause is None:
                    self._ended.wait(_LOOK_SECONDS)
        with self.process.endpoint.lock:
            if lives():
                registry.died(name, cause or f"its process {pid} ended")
        if near:
            self._free_blocks(pid)

    def _watch_child(self, registry: RegistryService, name: str, address: str) -> None:
        """Wait for the end of a process that a worker started, which is no actor of Ray: of one on
        another node nobody tells."""
        node, pid = process_at(address)
        if node == self.process.node_rank:
            self._wait_for_end(pid)
            with self.process.endpoint.lock:
                registry.left(name, address)
            self._free_blocks(pid)

    def _free_blocks(self, pid: int) -> None:
        """Free the shared memory of a process of this node that has ended; at the end of the
        cluster all of it goes."""
        if self._ended_here is not None and not self._ended.is_set():
            self._ended_here.add(pid)

    def _watch_control(self, pid: int) -> None:
        """Ask the program to end where Ray's control process does: workers go on without it, but
        within a minute Ray ends the whole program."""
        self._wait_for_end(pid)
        if self._ended.is_set() or not self._ray_is_ours():  # the program has stopped Ray itself
            return
        log.error("the control process of Ray, %d, has ended: nothing can be started any more", pid)
        if callable(signal.getsignal(signal.SIGTERM)):
            control_lost.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def _wait_for_end(self, pid: int) -> None:
        with suppress(OSError):  # it has ended
            descriptor = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not poll.poll(_LOOK_SECONDS * 1000) and not self._ended.is_set():
                pass
            os.close(descriptor)

    def flush_traces(self, registry: RegistryService) -> None:
        """Have every process hand over its trace events."""
        self._ask_all(registry.endpoints(), "trace.flush")

    def _ask_all(self, addresses: Iterable[str], kind: str) -> None:
        answers = []
        for address in addresses:
            with suppress(WorkerDiedError):
                answers.append(self.process.endpoint.request(address, kind))
        wait(answers, _ANSWER_SECONDS)

    def shutdown(self) -> None:
        """End our workers, stop Ray if it is ours, and remove our files."""
        self._ended.set()
        try:
            self._end_ray()
        finally:  # whatever ends that: a second interrupt may
            with holding_signals():
                self._leave()

    def _end_ray(self) -> None:
        if not self._ray_is_ours():
            return
        if not control_ended():
            self._end_workers()
        if control_ended():  # it may have ended meanwhile, as by a signal to all processes
            end_without_control()
        else:
            if hasattr(self, "namespace"):
                internal_kv._internal_kv_del(self.namespace.encode(), namespace=_KV_SPACE)
            ray.shutdown()
        os.environ.pop(ADDRESS_VARIABLE, None)

    def _leave(self) -> None:
        if hasattr(self, "process"):
            self.process.endpoint.close()
        if current_process() is getattr(self, "process", None):
            set_process(None)
        if self._files is not None:
            self._files.close()

    def _end_workers(self) -> None:
        if self._registry is not None:
            # One worker of each other node removes the cluster's files there.
            nodes = {address.partition("|")[0]: address for address in self._registry.endpoints()}
            nodes.pop(str(self.process.node_rank), None)
            self._ask_all(nodes.values(), "cluster.leave")
        for worker in self._started.values():
            worker.kill()
        limit = time.monotonic() + _LOOK_SECONDS
        for thread in self._watchers:
            thread.join(max(0.0, limit - time.monotonic()))

    def _ray_is_ours(self) -> bool:
        """Whether Ray is still the one that we joined: a program may have stopped it itself."""
        if not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().get_node_id() == self._own_node)


def attach_to_running() -> bool:
    """Enter the cluster that this process can reach; False if there is none."""
    if ATTACH_VARIABLE in os.environ:
        enter_from_environment()
        return True
    joined = not ray.is_initialized()
    if joined:
        address = join_address()
        if address is None:
            return False
        join(address)
    own_node = ray.get_runtime_context().get_node_id()
    for entry in _running_programs():
        rank = entry.get("nodes", {}).get(own_node)
        if rank is not None:  # else it is starting, or this node is not of its cluster
            own = {name: entry[name] for name in ("token", "driver", "deadline_seconds")}
            ip = entry["network_ips"].get(str(rank))
            enter_cluster(Membership(**own, node_rank=rank, network_ip=ip))
            return True
    if joined:  # who starts a cluster on it joins as its driver
        ray.shutdown()
    return False


def _running_programs() -> Iterator[dict[str, Any]]:
    """What is written of those that have a cluster on this Ray, by the order of their names."""
    names = internal_kv._internal_kv_list(NAMESPACE.encode(), namespace=_KV_SPACE)
    for name in sorted(names, key=lambda name: (len(name), name)):
        text = internal_kv._internal_kv_get(name, namespace=_KV_SPACE)
        if text is not None and not _is_gone(entry := json.loads(text)):
            yield entry


def _is_gone(entry: Mapping[str, Any]) -> bool:
    """Whether a program was killed and left its name behind: its process, on this node, or else its
    node is there no more."""
    if entry["node_id"] == ray.get_runtime_context().get_node_id():
        return not psutil.pid_exists(entry["pid"])
    return entry["node_id"] not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _claim_namespace(program: Mapping[str, Any]) -> str:
    """The first name space that no other program on this Ray cluster has."""
    claim = json.dumps(program).encode()
    for number in range(_MOST_NAMESPACES):
        name = NAMESPACE if number == 0 else f"{NAMESPACE}_{number}"
        key = name.encode()
        taken = internal_kv._internal_kv_put(key, claim, overwrite=False, namespace=_KV_SPACE)
        if taken:
            text = internal_kv._internal_kv_get(key, namespace=_KV_SPACE)
            if text is not None and _is_gone(json.loads(text)):
                internal_kv._internal_kv_del(key, namespace=_KV_SPACE)
                taken = internal_kv._internal_kv_put(
                    key, claim, overwrite=False, namespace=_KV_SPACE
                )
        if not taken:
            return name
    raise SchedulerError(f"all of {_MOST_NAMESPACES} name spaces of this Ray cluster are taken")
