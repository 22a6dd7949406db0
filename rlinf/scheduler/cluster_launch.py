"""From a placement to what each worker of a group is told."""

from __future__ import annotations

import random
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import PlacementError, SchedulerError
from rlinf.scheduler.hardware import Accelerator, HardwareInfo
from rlinf.scheduler.node import NodeGroupInfo, slot_cores
from rlinf.scheduler.placement import (
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
)
from rlinf.scheduler.process import require_process
from rlinf.scheduler.runtime.launch import Launch, merge_path_variables, worker_environment
from rlinf.scheduler.services.registry import GroupRecord

if TYPE_CHECKING:
    from rlinf.scheduler.cluster import Cluster
    from rlinf.scheduler.runtime.base import WorkerHandle
from collections.abc import Callable
from pathlib import Path

from rlinf.scheduler.cluster_sections import ProfilingConfig

_PORT_ATTEMPTS = 100


@dataclass(frozen=True)
class StartedGroup:
    """A group whose processes are starting."""

    record: GroupRecord
    handles: list[WorkerHandle]


def start_group(
    cluster: Cluster,
    name: str,
    worker_class: type,
    strategy: PlacementStrategy | None,
    *,
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    max_concurrency: int | None = None,
    isolate: bool = True,
    log: bool = True,
) -> StartedGroup:
    """Announce a group and start its workers, without waiting for them.

    Raises:
        NameTakenError: A group of that name is alive.
    """
    launches = _plan(cluster, name, strategy, isolate, log)
    record = GroupRecord(
        name,
        worker_class.__name__,
        tuple(launch.name for launch in launches),
        launches[0].incarnation,
        tuple(launch.placement.cluster_node_rank for launch in launches),
    )
    cluster.register_group(record, launches)
    start = cluster.runtime.start
    handles = [start(launch, worker_class, arguments, max_concurrency) for launch in launches]
    return StartedGroup(record, handles)


def _plan(
    cluster: Cluster, name: str, strategy: PlacementStrategy | None, isolate: bool, log: bool
) -> list[Launch]:
    """Launch parameters of every worker of a group, by rank."""
    strategy = strategy or _default_strategy(cluster)
    placements = strategy.get_placement(cluster, isolate_accelerator=isolate)
    if [placement.rank for placement in placements] != list(range(len(placements))):
        raise PlacementError(f"placement of '{name}' does not number its processes from 0")
    incarnation = secrets.token_hex(4)
    infos = [_worker_info(cluster, name, p, len(placements)) for p in placements]
    master = _master(cluster, placements[0], infos[0].address.get_name())
    return [
        _launch(cluster, (name, incarnation), placement, info, master, log)
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
    log: bool,
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
        driver=process.driver,
        token=runtime.token,
        deadline_seconds=process.deadline_seconds,
        cores=slot_cores(node, _own_devices(cluster, placement)),
        environment={**merge_path_variables(configured), **environment},
        network_ip=runtime.network_ips.get(node.node_rank),
        log_directory=cluster.distributed_log_dir if log else None,
        interpreter=_interpreter(cluster, node.node_rank, group, info.address.get_name()),
        traced=cluster.traced,
        import_paths=tuple(sys.path),
    )


def profiled_command(python: str, worker_name: str, config: ProfilingConfig | None) -> str:
    """Interpreter command of a worker, behind a profiler where its group is to be profiled."""
    if config is None or not config.enabled or not _selected(worker_name, config):
        return python
    directory = Path(config.output_dir or ".").resolve()
    report = directory / worker_name.replace(":", "_")
    options = [f"--{name}={value}" for name, value in config.options.items()]
    flags = [f"--{flag.lstrip('-')}" for flag in config.flags]
    return " ".join([_COMMANDS[config.backend](report), *options, *flags, python])


def _selected(worker_name: str, config: ProfilingConfig) -> bool:
    given = config.worker_groups
    groups = [given] if isinstance(given, str) else given or ["all"]
    names = {group.lower() for group in groups}
    return "all" in names or worker_name.partition(":")[0].lower() in names


def _nsight(report: Path) -> str:
    return f"nsys profile --output={report} --force-overwrite=true"


def _rocprof(report: Path) -> str:
    return f"rocprof-sys-python --output={report} --"


_COMMANDS: dict[str, Callable[[Path], str]] = {"nsight": _nsight, "rocprof_sys": _rocprof}
