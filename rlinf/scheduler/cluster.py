"""The cluster: machines, what they offer, and the services that workers share."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.scheduler.accelerators import DEVICE_VARIABLE, process_device
from rlinf.scheduler.address import WorkerAddress
from rlinf.scheduler.compat.cluster_members import ClusterEnvVar, ClusterMembers
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.node import NodeInfo, NodeTable, build_node_table
from rlinf.scheduler.process import (
    current_process,
    current_worker,
    is_outside,
    require_process,
    set_process,
)
from rlinf.scheduler.runtime.attach import show_log
from rlinf.scheduler.services.leases import LeaseTicket
from rlinf.scheduler.services.network import Network
from rlinf.scheduler.services.registry import DriverServices
from rlinf.scheduler.services.tracer import Tracer

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlinf.scheduler.cluster_config import ClusterConfig
    from rlinf.scheduler.runtime.base import Runtime, WorkerHandle

__all__ = ["Cluster", "ClusterEnvVar", "deadline_seconds"]

_DEFAULT_TIMEOUT_MINUTES = 180.0
_DEFAULT_TRACE_FILE = "trace/trace_events.jsonl"


class Cluster(NodeTable, ClusterMembers):
    """The machines of a program and the workers on them; one per process.

    The first call decides; later calls return the same object and ignore their arguments, until
    `shutdown`. Inside a worker ``Cluster()`` is the cluster that the worker belongs to.

    Of ``num_nodes`` on the ``ray`` runtime, 0 takes all that are connected; ``cluster_cfg`` is the
    ``cluster`` section of a configuration; what each worker logs, and as a process prints, is also
    written to ``<group>/rank_<rank>.log`` in ``distributed_log_dir``.

    Raises:
        ValueError: ``num_nodes`` contradicts ``cluster_cfg``.
        RuntimeError: Ray was initialised before.
    """

    _instance: ClassVar[Cluster | None] = None
    _ready: bool

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Cluster:
        """The one cluster of this process."""
        # Programs begin anew by deleting this attribute.
        cluster: Cluster | None = getattr(cls, "_instance", None)
        if cluster is None:
            cluster = cls._instance = super().__new__(cls)
            cluster._ready = False
        return cluster

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: DictConfig | Mapping[str, Any] | ClusterConfig | None = None,
        distributed_log_dir: str | None = None,
    ) -> None:
        if self._ready:
            return
        show_log()
        self.distributed_log_dir = distributed_log_dir
        self._services: DriverServices | None = None
        before = current_process()
        try:
            if num_nodes is None and cluster_cfg is None:
                self._attach()
            else:
                # Workers do without what reads configurations, which takes long to import.
                from rlinf.scheduler.cluster_config import read_config

                self._create(read_config(num_nodes, cluster_cfg), all_nodes=num_nodes == 0)
        except BaseException:
            if self._services is None and hasattr(self, "runtime"):
                self.runtime.shutdown()
            self._ready = True  # so far as it has come
            self.shutdown()
            set_process(before)
            raise
        self._ready = True

    def _create(self, config: ClusterConfig, *, all_nodes: bool) -> None:
        """Start the cluster that this process drives."""
        deadline = deadline_seconds(config)
        if config.runtime == "local":
            from rlinf.scheduler.runtime.local import LocalRuntime

            if os.environ.get(DEVICE_VARIABLE):
                process_device()  # one that is not there is told before anything starts
            self.runtime: Runtime = LocalRuntime(config, deadline)
        else:
            _prepare_ray()
            from rlinf.scheduler.runtime.ray import RayRuntime

            self.runtime = RayRuntime(config, deadline, all_nodes=all_nodes)
        traced, tracer = config.tracer, None
        if traced and traced.enable:
            tracer = Tracer(traced.output_file or _DEFAULT_TRACE_FILE)
        self.config = config
        process = self.runtime.process
        self._services = DriverServices(process, tracer, config.slow_links())
        self._set_nodes(self.runtime.nodes)
        self.traced = tracer is not None
        process.waits.add_worker("driver")
        process.endpoint.register("cluster.describe", self._describe)
        process.endpoint.register("cluster.channel_hosts", self._channel_hosts)
        self.runtime.watch_deaths(self._services.registry)
        atexit.register(self.shutdown)

    def _attach(self) -> None:
        """Join the cluster of this worker, or of the Ray cluster that this process can reach."""
        if current_process() is None:
            _prepare_ray()
            from rlinf.scheduler.runtime.ray import attach_to_running

            if not attach_to_running():
                warnings.warn(
                    "there is no cluster to attach to: starting one with all connected nodes",
                    stacklevel=4,
                )
                from rlinf.scheduler.cluster_config import read_config

                self._create(read_config(None, None), all_nodes=True)
                return
        from rlinf.scheduler.runtime.ray import RayClientRuntime

        process = require_process()
        description = process.ask_driver("cluster.describe")
        self.config, nodes, self.traced, self.distributed_log_dir, place = description
        self._set_nodes(nodes)
        if process.network is None and self.config.slow_links() is not None:
            process.network = Network(process)
        self.runtime = RayClientRuntime(process, nodes, *place)

    def _set_nodes(self, nodes: list[NodeInfo]) -> None:
        table = build_node_table(nodes, self.config)
        self.nodes, self.node_groups = table.nodes, table.node_groups
        # Programs reach for these.
        self._nodes, self._node_groups = nodes, list(table.node_groups.values())
        self._num_nodes = len(nodes)

    def _describe(self) -> Any:
        runtime = self.runtime
        place = (runtime.token, runtime.namespace, runtime.network_ips)
        return self.config, self._nodes, self.traced, self.distributed_log_dir, place

    def _channel_hosts(self, distributed: bool, node_rank: int) -> Any:
        self.get_node_info(node_rank)
        nodes = range(self.num_nodes) if distributed else [node_rank]
        return self.runtime.channel_hosts(self, nodes)

    @property
    def running(self) -> bool:
        """Whether it is up: until `shutdown`."""
        return self._ready

    def get_node_ip(self, node_rank: int) -> str:
        """Address of a node."""
        return self.get_node_info(node_rank).node_ip

    def reserve_lease(self, holder: WorkerAddress | str, devices: Iterable[int]) -> LeaseTicket:
        """Queue a request for devices now, to be redeemed later by ``ticket.acquire()``.

        Leases are granted in the order in which they were reserved, so a driver that reserves in
        topological order decides who goes first. A ticket can be passed to a worker. If the holder
        is the name of a worker, its death frees the devices. ``devices`` are cluster-wide ranks;
        an empty set is granted at once.
        """
        name = holder if isinstance(holder, str) else holder.get_name()
        wanted = tuple(devices)
        return LeaseTicket(require_process().ask_driver("lease.reserve", name, wanted), wanted)

    def close_group(self, name: str, incarnation: str, handles: list[WorkerHandle]) -> None:
        """End the workers of a group and free its name."""
        process = current_process()
        if process is not None and self._ready:
            process.ask_driver("registry.remove_group", name, incarnation)
            for handle in handles:
                handle.kill()

    def shutdown(self) -> None:
        """End every worker, remove every file of the cluster, and allow a new one.

        Ray is stopped only if this cluster started it. Called at the end of the process.
        """
        if not self._ready:
            return
        self._ready = False
        if getattr(type(self), "_instance", None) is self:
            type(self)._instance = None
        with ExitStack() as ends:  # whichever of them a second interrupt ends, the others are done
            if current_worker() is None:
                ends.callback(set_process, None)
            if self._services is not None:
                ends.callback(self._services.close)
                ends.callback(self.runtime.shutdown)
                atexit.unregister(self.shutdown)
                # Of a program that ends by a failure one is told: that which ends it.
                if sys.exc_info()[0] is None and (process := current_process()) is not None:
                    process.failed_calls.tell_unheard()
                self.runtime.flush_traces(self._services.registry)

    @staticmethod
    def has_initialized() -> bool:
        """Whether this process is in a cluster."""
        return current_process() is not None


def _leave_to_parent() -> None:
    """In a forked child: the cluster is its parent's, also at the end of the child."""
    if is_outside() and (cluster := getattr(Cluster, "_instance", None)) is not None:
        cluster._ready, Cluster._instance = False, None


os.register_at_fork(after_in_child=_leave_to_parent)


def _prepare_ray() -> None:
    """What Ray reads when it is imported.

    A call to Ray after its end is an error, instead of a new Ray cluster in the background. It may
    take longer to start than its minute, on a machine that has much else to do.
    """
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")


def deadline_seconds(config: ClusterConfig) -> float:
    """Seconds that a wait may take: by the config, else by ``RLINF_TIMEOUT``, else the default."""
    if config.timeout_minutes is not None:
        return config.timeout_minutes * 60
    text = os.environ.get("RLINF_TIMEOUT")
    if text is None:
        return _DEFAULT_TIMEOUT_MINUTES * 60
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:  # nor is what is no number
        raise SchedulerUsageError(
            f"RLINF_TIMEOUT is the number of minutes that a wait may take, got {text!r}; for "
            "example RLINF_TIMEOUT=30"
        )
    return minutes * 60
