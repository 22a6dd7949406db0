"""From a placement to what each worker of a group is told."""

from __future__ import annotations

import random
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import ClusterConfigValueError, PlacementError, SchedulerError
from rlinf.scheduler.hardware import Accelerator
from rlinf.scheduler.node import NodeInfo, slot_cores
from rlinf.scheduler.placement import (
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
)
from rlinf.scheduler.process import require_process
from rlinf.scheduler.profiler import PROFILERS, profiled_command
from rlinf.scheduler.runtime.launch import (
    Launch,
    Membership,
    merge_path_variables,
    program_has_torch,
    program_paths,
    worker_environment,
)
from rlinf.scheduler.services.registry import GroupRecord

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.runtime.base import WorkerHandle

_PORT_ATTEMPTS = 100


def start_group(
    cluster: Cluster,
    name: str,
    worker_class: type,
    strategy: PlacementStrategy | None,
    *,
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    max_concurrency: int | None = None,
    isolate: bool = True,
    catch_failure: bool | None = None,
    log: bool = True,
) -> tuple[GroupRecord, list[WorkerHandle]]:
    """Announce a group and start its workers, without waiting for them.

    Raises:
        NameTakenError: A group of that name is alive.
    """
    if strategy is None and cluster.num_accelerators:
        strategy = PackedPlacementStrategy(0, cluster.num_accelerators - 1)
    strategy = strategy or NodePlacementStrategy([0])
    placements = strategy.get_placement(cluster, isolate_accelerator=isolate)
    if [placement.rank for placement in placements] != list(range(len(placements))):
        raise PlacementError(f"placement of '{name}' does not number its processes from 0")
    incarnation = secrets.token_hex(4)
    infos = [_worker_info(cluster, name, p, len(placements)) for p in placements]
    master = _master(cluster, infos[0])
    log_directory = cluster.distributed_log_dir if log else None
    torch = program_has_torch(worker_class)
    launches = [
        _launch(cluster, incarnation, placement, info, master, catch_failure, log_directory, torch)
        for placement, info in zip(placements, infos, strict=True)
    ]
    record = GroupRecord(
        name,
        worker_class.__name__,
        tuple(launch.name for launch in launches),
        incarnation,
        tuple(placement.cluster_node_rank for placement in placements),
    )
    require_process().ask_driver("registry.add_group", record, launches)
    start, handles = cluster.runtime.start, []
    try:
        for launch in launches:
            handles.append(start(launch, worker_class, arguments, max_concurrency))
    except BaseException:  # what cannot be sent to a worker, or an interrupt
        cluster.close_group(name, incarnation, handles)
        raise
    return record, handles


def _worker_info(
    cluster: Cluster, group_name: str, placement: Placement, world_size: int
) -> WorkerInfo:
    node = cluster.get_node_info(placement.cluster_node_rank)
    devices = _own_devices(cluster, placement)
    node_devices = cluster.accelerator_ranks[node.node_rank]
    group = cluster.get_node_group(placement.node_group_label)
    robots = []
    if group is not None and group.hardware_type not in (None, Accelerator.HW_TYPE):
        found = group.get_hardware_infos(node.node_rank)
        robots = [found[rank] for rank in placement.local_hardware_ranks]
    return WorkerInfo(
        address=WorkerAddress(group_name, placement.rank),
        rank=placement.rank,
        group_world_size=world_size,
        cluster_node_rank=node.node_rank,
        accelerator_type=placement.accelerator_type,
        accelerator_model=node.accelerator_model,
        accelerator_rank=devices[0] if devices else -1,
        node_ip=node.node_ip,
        node_port=0,
        available_accelerators=[node_devices[rank] for rank in devices],
        hardware_infos=robots,
    )


def _own_devices(cluster: Cluster, placement: Placement) -> list[int]:
    """Local ranks of the devices that a worker was placed on; none if it was placed by node."""
    group = cluster.get_node_group(placement.node_group_label)
    if group is None or group.hardware_type != Accelerator.HW_TYPE:
        return []
    return list(placement.local_hardware_ranks)


def _master(cluster: Cluster, first: WorkerInfo) -> tuple[str, int]:
    """Address at which the group's ranks may meet, on the node of rank 0."""
    process = require_process()
    node_rank = first.cluster_node_rank
    for _ in range(_PORT_ATTEMPTS):
        # Another node cannot be asked before its worker is up; a random port is free there unless
        # something else happens to use it.
        here = node_rank == process.node_rank
        port = free_port() if here else random.SystemRandom().randrange(20000, 32000)
        if process.ask_driver("registry.take_port", node_rank, port, first.address.get_name()):
            return cluster.get_node_ip(node_rank), port
    raise SchedulerError(f"no free port for group master on node {node_rank}")


def free_ports(highest: int | None = None) -> Iterator[int]:
    """Ports of this machine that nothing listens on, each at most once up to ``highest``."""
    # In no order, so that programs which look at the same time do not find the same one.
    candidates = repeat(0) if highest is None else _shuffled(range(1024, min(highest, 65535) + 1))
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            free: int = probe.getsockname()[1]
        yield free


def free_port(highest: int | None = None) -> int:
    """A port of this machine that nothing listens on, at most ``highest``."""
    for port in free_ports(highest):
        return port
    raise SchedulerError(f"no free port up to {highest}")


def _shuffled(numbers: range) -> list[int]:
    return random.SystemRandom().sample(numbers, len(numbers))


def _launch(  # noqa: PLR0917 - private
    cluster: Cluster,
    incarnation: str,
    placement: Placement,
    info: WorkerInfo,
    master: tuple[str, int],
    catch_failure: bool | None,
    log_directory: str | None,
    imports_torch: bool,
) -> Launch:
    node = cluster.get_node_info(placement.cluster_node_rank)
    group = cluster.get_node_group(placement.node_group_label)
    variables = group.get_node_env_vars(node.node_rank) if group else {}
    # None keeps the interpreter that Ray has started already.
    interpreter = group.get_node_python_interpreter_path(node.node_rank) if group else None
    python = interpreter or sys.executable
    command = profiled_command(python, info.address.get_name(), cluster.config.profiling)
    runtime, process = cluster.runtime, require_process()
    if process.runtime == "ray":
        _refuse_missing(shlex.split(command), node, info.address.get_name())
    environment = worker_environment(
        placement,
        info,
        master=master,
        namespace=runtime.namespace,
        one_machine=not runtime.network_ips,
        node_environment=node.default_env_vars,
        catch_failure=catch_failure,
    )
    return Launch(
        incarnation=incarnation,
        placement=placement,
        info=info,
        membership=Membership(
            token=runtime.token,
            driver=process.driver,
            node_rank=node.node_rank,
            network_ip=runtime.network_ips.get(node.node_rank),
            deadline_seconds=process.deadline_seconds,
        ),
        cores=slot_cores(node, _own_devices(cluster, placement)),
        environment={**merge_path_variables(variables, node.default_env_vars), **environment},
        log_directory=log_directory,
        interpreter=interpreter if command == python else command,
        traced=cluster.traced,
        slow_links=process.network is not None,
        configured=tuple(variables),
        import_paths=tuple(sys.path),
        late_paths=program_paths()[1],
        imports_torch=imports_torch,
    )


def _refuse_missing(words: list[str], node: NodeInfo, worker_name: str) -> None:
    """Raise where a command cannot be started: Ray would try it until the deadline."""
    for word in words:
        if word in node.missing_programs:
            profiler = word in PROFILERS.values()
            field = "profiling" if profiler else "node_groups: python_interpreter_path"
            nearest = "enabled=false" if profiler else sys.executable
            raise ClusterConfigValueError(
                f"'{word}' of cluster.{field} is no program on node {node.node_rank} "
                f"({node.node_ip}), so worker '{worker_name}' cannot start there. Install it, or "
                f"add its folder to PATH there. Nearest legal: {nearest}."
            )
