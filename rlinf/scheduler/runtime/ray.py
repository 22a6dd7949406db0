"""The ray runtime: every worker is a Ray actor, on this machine and others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental import internal_kv

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.cluster_launch import start_group
from rlinf.scheduler.errors import SchedulerError, SchedulerUsageError, WorkerDiedError
from rlinf.scheduler.node import NodeInfo
from rlinf.scheduler.placement import NodePlacementStrategy
from rlinf.scheduler.process import Process, set_process
from rlinf.scheduler.runtime.attach import (
    ATTACH_VARIABLE,
    ChannelHost,
    enter_cluster,
    enter_from_environment,
)
from rlinf.scheduler.runtime.deaths import DeathWatch
from rlinf.scheduler.runtime.ray_calls import RayRuntimeBase
from rlinf.scheduler.runtime.ray_start import NAMESPACE, connect, find_nodes
from rlinf.scheduler.transport.endpoint import Reply, try_fail, try_resolve
from rlinf.scheduler.transport.session import OwnedSession

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.services.registry import RegistryService

_KV_SPACE = b"RLinf"
_ANSWER_SECONDS = 2.0
_MOST_NAMESPACES = 1000


class RayRuntime(RayRuntimeBase):
    """Starts or joins Ray and runs workers as actors.

    Args:
        config: The ``cluster`` section.
        deadline_seconds: How long a wait may take.
        all_nodes: Use every node that is connected instead of ``config.num_nodes``.
    """

    def __init__(
        self, config: ClusterConfig, deadline_seconds: float, *, all_nodes: bool = False
    ) -> None:
        super().__init__()
        if ray.is_initialized():
            raise SchedulerUsageError(
                "Ray is initialised already. Create the Cluster before anything calls ray.init(): "
                "it sets Ray's name space and logging."
            )
        self._owns_ray = connect(config)
        self._owned: OwnedSession | None = None
        self._watch: DeathWatch | None = None
        self._registry: RegistryService | None = None
        self._channel_nodes: set[int] = set()
        try:
            nodes = find_nodes(config, deadline_seconds, all_nodes)
            self._owned = OwnedSession()
            self._enter(nodes, deadline_seconds)
        except BaseException:
            self.shutdown()
            raise

    def _enter(self, nodes: list[NodeInfo], deadline_seconds: float) -> None:
        own_id = ray.get_runtime_context().get_node_id()
        own_rank = next(node.node_rank for node in nodes if node.ray_id == own_id)
        several = len(nodes) > 1
        network_ips = {node.node_rank: node.node_ip for node in nodes} if several else {}
        owned = self._owned or OwnedSession()
        process = enter_cluster(
            token=owned.session.token,
            driver="",
            node_rank=own_rank,
            network_ip=network_ips.get(own_rank),
            deadline_seconds=deadline_seconds,
        )
        process.driver = process.endpoint.address
        # The driver itself is no parent of workers in child processes.
        os.environ.pop(ATTACH_VARIABLE, None)
        self._use(process, nodes, owned.session.token, _claim_namespace(), network_ips)
        entry = {
            "token": self.token,
            "driver": process.driver,
            "deadline_seconds": deadline_seconds,
            "nodes": {node.ray_id: node.node_rank for node in nodes},
            "network_ips": network_ips,
        }
        internal_kv._internal_kv_put(
            self.namespace.encode(), json.dumps(entry).encode(), namespace=_KV_SPACE
        )

    def watch_deaths(self, registry: RegistryService) -> None:
        """Tell the registry when a worker's process ends."""
        self._registry = registry
        owned = self._owned
        if owned is not None:
            self._watch = DeathWatch(self.process, owned.session, registry, self.find)
            registry.on_start = self._watch.add

    def channel_hosts(self, cluster: Cluster, nodes: Sequence[int]) -> Any:
        """Endpoints that host channels on these nodes; other nodes get a process for it."""
        hosts = {n: self.process.driver for n in nodes if n == self.process.node_rank}
        result: Future[Reply] = Future()
        others = [node for node in nodes if node not in hosts]
        if not others:
            return hosts

        def add(node: int, answer: Future[Reply]) -> None:
            error = answer.exception()
            if error is not None:
                try_fail(result, error)
                return
            hosts[node] = answer.result().value
            if len(hosts) == len(nodes):
                try_resolve(result, Reply(hosts))

        for node in others:
            worker = self._channel_worker(cluster, node)
            found = self.process.endpoint.request(self.process.driver, "registry.lookup", worker)
            found.add_done_callback(lambda answer, node=node: add(node, answer))  # type: ignore[misc]
        return result

    def _channel_worker(self, cluster: Cluster, node: int) -> str:
        name = f"ChannelWorker_node{node}"
        if node not in self._channel_nodes:
            self._channel_nodes.add(node)
            start_group(cluster, name, ChannelHost, NodePlacementStrategy([node]), log=False)
        return f"{name}:0"

    def flush_traces(self, registry: RegistryService) -> None:
        """Have every process hand over its trace events."""
        self._ask_all(registry.endpoints(), "trace.flush")

    def _leave_other_nodes(self, registry: RegistryService) -> None:
        """Let one worker of each other node remove the cluster's files there."""
        by_node = {address.partition("|")[0]: address for address in registry.endpoints()}
        by_node.pop(str(self.process.node_rank), None)
        self._ask_all(by_node.values(), "session.end")

    def _ask_all(self, addresses: Iterable[str], kind: str) -> None:
        answers = []
        for address in addresses:
            with suppress(WorkerDiedError):
                answers.append(self.process.endpoint.request(address, kind))
        limit = time.monotonic() + _ANSWER_SECONDS
        while any(not answer.done() for answer in answers) and time.monotonic() < limit:
            time.sleep(0.01)

    def shutdown(self) -> None:
        """End our workers, stop Ray if it is ours, and remove our files."""
        if self._watch is not None:
            self._watch.close()
        if ray.is_initialized():
            if self._registry is not None:
                self._leave_other_nodes(self._registry)
            for worker in self._started.values():
                worker.kill()
            if hasattr(self, "namespace"):
                internal_kv._internal_kv_del(self.namespace.encode(), namespace=_KV_SPACE)
            ray.shutdown()
        if hasattr(self, "process"):
            self.process.endpoint.close()
        set_process(None)
        if self._owned is not None:
            self._owned.close()


class RayClientRuntime(RayRuntimeBase):
    """The runtime in a worker, or in another process that attached to the cluster."""

    def __init__(
        self,
        process: Process,
        nodes: list[NodeInfo],
        token: str,
        namespace: str,
        network_ips: dict[int, str],
    ) -> None:
        super().__init__()
        self._use(process, nodes, token, namespace, network_ips)


def attach_to_running() -> bool:
    """Enter the cluster that this process can reach; False if there is none."""
    if ATTACH_VARIABLE in os.environ:
        enter_from_environment()
        return True
    if not ray.is_initialized():
        if not os.environ.get("RAY_ADDRESS"):
            return False
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    text = internal_kv._internal_kv_get(NAMESPACE.encode(), namespace=_KV_SPACE)
    if text is None:
        return False
    entry = json.loads(text)
    node_rank = entry["nodes"][ray.get_runtime_context().get_node_id()]
    enter_cluster(
        token=entry["token"],
        driver=entry["driver"],
        node_rank=node_rank,
        network_ip=entry["network_ips"].get(str(node_rank)),
        deadline_seconds=entry["deadline_seconds"],
    )
    return True


def _claim_namespace() -> str:
    """The first name space that no other program on this Ray cluster has."""
    for number in range(_MOST_NAMESPACES):
        name = NAMESPACE if number == 0 else f"{NAMESPACE}_{number}"
        taken = internal_kv._internal_kv_put(
            name.encode(), b"{}", overwrite=False, namespace=_KV_SPACE
        )
        if not taken:
            return name
    raise SchedulerError(f"all of {_MOST_NAMESPACES} name spaces of this Ray cluster are taken")
