"""How a worker's process enters the cluster."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rlinf.config.nearest import did_you_mean
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.process import (
    Process,
    current_process,
    is_outside,
    require_process,
    set_current_worker,
    set_process,
    take_launching,
)
from rlinf.scheduler.runtime.launch import Launch, Membership
from rlinf.scheduler.services.network import Network
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.blocks import BlockPool
from rlinf.scheduler.transport.cluster_files import ClusterFiles
from rlinf.scheduler.transport.payload import Codec
from rlinf.scheduler.transport.rendezvous import listen_at
from rlinf.scheduler.transport.sockets import SocketEndpoint, process_at

ATTACH_VARIABLE = "RLINF_ATTACH"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_entry: str | None = None
"""What a process that this one starts or forks needs to enter the cluster."""


def enter_cluster(own: Membership) -> Process:
    """Give this process an endpoint and make the cluster its own."""
    files = ClusterFiles(own.token)
    if own.driver:
        node_rank, pid = process_at(own.driver)
        if node_rank == own.node_rank:
            files.remove_after(pid)
        else:
            files.hold()
    codec = Codec(BlockPool(files), own.node_rank)
    endpoint = SocketEndpoint(files, codec, own.node_rank, own.network_ip)
    process = Process(
        runtime="ray",
        endpoint=endpoint,
        codec=codec,
        driver=own.driver or endpoint.address,
        node_rank=own.node_rank,
        deadline_seconds=own.deadline_seconds,
    )
    endpoint.register("cluster.leave", files.remove)
    set_process(process)
    listen_at(own.network_ip)
    global _entry  # noqa: PLW0603 - one cluster per process
    _entry = json.dumps(dataclasses.asdict(dataclasses.replace(own, driver=process.driver)))
    if own.driver:  # what a child process needs, should this one start some that become workers
        os.environ[ATTACH_VARIABLE] = _entry
    return process


def _show_entry() -> None:
    """In a forked child, that of a driver too: it enters as one that a worker started does."""
    if is_outside() and _entry is not None:
        os.environ[ATTACH_VARIABLE] = _entry


os.register_at_fork(after_in_child=_show_entry)


def enter_from_environment() -> Process:
    """Enter the cluster of the process that started this one."""
    text = os.environ.get(ATTACH_VARIABLE)
    if text is None:
        raise SchedulerUsageError(
            "this process was not started by a worker, so it cannot become one: launch a worker "
            "group instead"
        )
    return enter_cluster(Membership(**json.loads(text)))


def child_launch(parent: WorkerAddress, world_size: int, rank: int) -> Launch:
    """Launch parameters of a process that a worker started itself."""
    process = current_process() or enter_from_environment()
    info: WorkerInfo | None = process.ask_driver("registry.info", parent.get_name())
    if info is None:
        raise SchedulerUsageError(f"parent worker '{parent.get_name()}' is not running")
    address = parent.get_child_address(rank)
    info = dataclasses.replace(info, address=address, rank=rank, group_world_size=world_size)
    launch: Launch = process.ask_driver("registry.launch", parent.get_name())
    placement = dataclasses.replace(launch.placement, rank=rank)
    return dataclasses.replace(launch, info=info, placement=placement)


def adopt(worker: Any, launch: Launch) -> None:
    """Make a worker that is being built the current one, and reachable."""
    worker._rlinf_launch = launch
    process = require_process()
    endpoint, alone = process.endpoint, process.runtime == "ray"
    set_current_worker(worker, whole_process=alone)
    process.waits.add_worker(launch.name)
    if alone:
        endpoint.register("trace.flush", Tracer.flush)
    if launch.traced and alone:
        Tracer.enable(lambda events: endpoint.tell(process.driver, "trace.record", events))
    if launch.slow_links and alone:
        process.network = Network(process)
    if launch.log_directory is not None:
        _open_log(launch)
    own = (launch.name, endpoint.address, launch.info, launch.incarnation)
    process.ask_driver("registry.register", *own)


def show_log() -> None:
    """Let log lines of this process reach its standard error, from ``RLINF_LOG_LEVEL`` on: that of
    a worker Ray shows on the driver. Where the program has a handler of its own, that one does."""
    logger, level = logging.getLogger("rlinf"), os.environ.get("RLINF_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        hint = did_you_mean(level, ["DEBUG", "INFO", "WARNING", "ERROR"])
        raise SchedulerUsageError(f"RLINF_LOG_LEVEL is {level}, which is no level; {hint}")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        handler.addFilter(lambda _: not logging.getLogger().handlers)  # set up later
        logger.addHandler(handler)


def copy_output(launch: Launch) -> None:
    """Copy what this process prints from now on, and its children, to the file of its worker.

    Programs of their own do it: they also get the last words of a process that crashes.
    """
    path = _log_file(launch)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        read, write = os.pipe()
        descriptor = stream.fileno()
        actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, descriptor, 1)]
        command = ["tee", "-ai", str(path)]
        os.posix_spawnp("tee", command, os.environ, file_actions=actions, setsid=True)
        os.dup2(write, descriptor)
        os.close(read)
        os.close(write)


def _log_file(launch: Launch) -> Path:
    """File of a worker that has one."""
    directory = Path(launch.log_directory or "") / launch.info.address.root_group_name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"rank_{launch.info.rank}.log"


def _open_log(launch: Launch) -> None:
    handler = logging.FileHandler(_log_file(launch))
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    handler.addFilter(lambda record: _first_argument(record) == launch.name)
    handler.set_name(launch.name)
    logging.getLogger("rlinf").addHandler(handler)


def close_log(name: str) -> None:
    """Write no more to the file of a worker that has ended in this process."""
    logger = logging.getLogger("rlinf")
    for handler in [each for each in logger.handlers if each.get_name() == name]:
        logger.removeHandler(handler)
        handler.close()


class ChannelHost:
    """The process that answers for the channels of a node other than the driver's.

    Those of the driver's node live in the driver.
    """

    def _rlinf_tell(self, launch: Launch) -> None:
        """It has no methods of a user that would ask which worker it is."""

    def __init__(self) -> None:
        launch: Launch = take_launching()
        self.worker_address = launch.info.address
        adopt(self, launch)


def _first_argument(record: logging.LogRecord) -> str | None:
    arguments = record.args
    return str(arguments[0]) if isinstance(arguments, tuple) and arguments else None
