"""From a placement to what each worker of a group is told."""

from __future__ import annotations

import random
import secrets
import socket
import sys
from typing import TYPE_CHECKING

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import PlacementError, SchedulerError
from rlinf.scheduler.hardware import Accelerator, HardwareInfo
from rlinf.scheduler.node import NodeGroupInfo
from rlinf.scheduler.node_table import slot_cores
from rlinf.scheduler.placement import (
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
)
from rlinf.scheduler.process import require_process
from rlinf.scheduler.profiling import profiled_command
from rlinf.scheduler.worker.launch import Launch, merge_path_variables, worker_environment

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster

_PORT_ATTEMPTS = 100


def plan_launches(
    cluster: Cluster,
    group_name: str,
    strategy: PlacementStrategy | None,
    isolate: bool,
    no_log: bool,
) -> list[Launch]:
    """Launch parameters of every worker of a group, by rank."""
    strategy = strategy or _default_strategy(cluster)
    placements = strategy.get_placement(cluster, isolate_accelerator=isolate)
    if [placement.rank for placement in placements] != list(range(len(placements))):
        raise PlacementError(f"placement of '{group_name}' does not number its processes from 0")
    incarnation = secrets.token_hex(4)
    infos = [_worker_info(cluster, group_name, p, len(placements)) for p in placements]
    master = _master(cluster, placements[0], infos[0].address.get_name())
    return [
        _launch(cluster, (group_name, incarnation), placement, info, master, no_log)
        for placement, info in zip(placements, infos, strict=True)
    ]


def _default_strategy(cluster: Cluster) -> PlacementStrategy:
    if cluster.num_accelerators == 0:
        return NodePlacementStrategy([0])
    return PackedPlacementStrategy(0, cluster.num_accelerators - 1)


def _worker_info(
    cluster: Cluster, group_name: str, placement: Placement, world_size: int
) -> WorkerInfo:
    node = cluster.get_node_info(placement.cluster_node_rank)
    devices = _own_devices(cluster, placement)
    node_devices = cluster.accelerator_ranks[placement.cluster_node_rank]
    return WorkerInfo(
        address=WorkerAddress(group_name, placement.rank),
        rank=placement.rank,
        group_world_size=world_size,
        cluster_node_rank=placement.cluster_node_rank,
        accelerator_type=placement.accelerator_type,
        accelerator_model=node.accelerator_model,
        accelerator_rank=devices[0] if devices else -1,
        node_ip=node.node_ip,
        node_port=0,
        available_accelerators=[node_devices[rank] for rank in devices],
        hardware_infos=_hardware_infos(cluster, placement),
    )


def _own_devices(cluster: Cluster, placement: Placement) -> list[int]:
    """Local ranks of the devices that a worker was placed on; none if it was placed by node."""
    group = cluster.get_node_group(placement.node_group_label)
    if group is None or group.hardware_type != Accelerator.HW_TYPE:
        return []
    return list(placement.local_hardware_ranks)


def _hardware_infos(cluster: Cluster, placement: Placement) -> list[HardwareInfo]:
    group = cluster.get_node_group(placement.node_group_label)
    if group is None or group.hardware_type in (None, Accelerator.HW_TYPE):
        return []
    infos = group.get_hardware_infos(placement.cluster_node_rank)
    return [infos[rank] for rank in placement.local_hardware_ranks]


def _master(cluster: Cluster, placement: Placement, worker: str) -> tuple[str, int]:
    """Address at which the group's ranks may meet, on the node of rank 0."""
    process = require_process()
    node_rank = placement.cluster_node_rank
    address = cluster.get_node_ip(node_rank)
    for _ in range(_PORT_ATTEMPTS):
        if node_rank == process.node_rank:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port: int = probe.getsockname()[1]
        else:
            # The other node cannot be asked before its worker is up; a random port is free there
            # unless something else happens to use it.
            port = random.SystemRandom().randrange(20000, 32000)
        if process.ask_driver("port.take", node_rank, port, worker):
            return address, port
    raise SchedulerError(f"no free port for group master on node {node_rank}")


def _interpreter(
    cluster: Cluster, node_rank: int, group: NodeGroupInfo | None, worker_name: str
) -> str | None:
    """Command that runs a worker, None for the interpreter that Ray has started already."""
    configured = group.get_node_python_interpreter_path(node_rank) if group else None
    command = profiled_command(configured or sys.executable, worker_name, cluster.config.profiling)
    return configured if command == (configured or sys.executable) else command


def _launch(  # noqa: PLR0917 - private
    cluster: Cluster,
    names: tuple[str, str],
    placement: Placement,
    info: WorkerInfo,
    master: tuple[str, int],
    no_log: bool,
) -> Launch:
    group_name, incarnation = names
    node = cluster.get_node_info(placement.cluster_node_rank)
    group = cluster.get_node_group(placement.node_group_label)
    configured = group.get_node_env_vars(node.node_rank) if group is not None else {}
    runtime = cluster.runtime
    environment = worker_environment(
        group_name=group_name,
        worker_name=info.address.get_name(),
        world_size=info.group_world_size,
        placement=placement,
        accelerator_model=node.accelerator_model,
        master=master,
        namespace=runtime.namespace,
        one_machine=not runtime.network_ips,
    )
    process = require_process()
    return Launch(
        group_name=group_name,
        incarnation=incarnation,
        world_size=info.group_world_size,
        placement=placement,
        info=info,
        runtime=process.runtime,
        driver=process.driver,
        token=runtime.token,
        namespace=runtime.namespace,
        deadline_seconds=process.deadline_seconds,
        cores=slot_cores(node, _own_devices(cluster, placement)),
        environment={**merge_path_variables(configured), **environment},
        network_ip=runtime.network_ips.get(node.node_rank),
        log_directory=None if no_log else cluster.distributed_log_dir,
        interpreter=_interpreter(cluster, node.node_rank, group, info.address.get_name()),
        traced=cluster.traced,
        import_paths=tuple(sys.path),
    )
