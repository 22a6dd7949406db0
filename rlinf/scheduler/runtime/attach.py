"""How a worker's process enters the cluster."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.process import (
    Process,
    current_process,
    require_process,
    set_current_worker,
    set_process,
    take_launching,
)
from rlinf.scheduler.rendezvous import listen_at
from rlinf.scheduler.runtime.launch import Launch
from rlinf.scheduler.services.tracer import Tracer
from rlinf.scheduler.transport.blocks import AttachedBlocks, BlockPool
from rlinf.scheduler.transport.payload import Codec
from rlinf.scheduler.transport.session import Session, hold_session
from rlinf.scheduler.transport.sockets import SocketEndpoint

ATTACH_VARIABLE = "RLINF_ATTACH"


def enter_cluster(
    *, token: str, driver: str, node_rank: int, network_ip: str | None, deadline_seconds: float
) -> Process:
    """Give this process an endpoint and make the cluster its own."""
    session = Session(token)
    if driver and driver.partition("|")[0] != str(node_rank):
        hold_session(session)
    pool = BlockPool(session)
    codec = Codec(pool, AttachedBlocks())
    process = Process(
        runtime="ray",
        endpoint=SocketEndpoint(session, codec, node_rank, network_ip),
        codec=codec,
        driver=driver,
        node_rank=node_rank,
        deadline_seconds=deadline_seconds,
    )
    process.endpoint.register("session.end", session.remove_files)
    set_process(process)
    listen_at(network_ip)
    # What a child process needs, should this one start children that become workers.
    os.environ[ATTACH_VARIABLE] = json.dumps(
        {
            "token": token,
            "driver": driver,
            "node_rank": node_rank,
            "network_ip": network_ip,
            "deadline_seconds": deadline_seconds,
        }
    )
    return process


def enter_from_environment() -> Process:
    """Enter the cluster of the process that started this one.

    Raises:
        SchedulerUsageError: That process is in no cluster.
    """
    text = os.environ.get(ATTACH_VARIABLE)
    if text is None:
        raise SchedulerUsageError(
            "this process was not started by a worker, so it cannot become one: launch a worker "
            "group instead"
        )
    return enter_cluster(**json.loads(text))


def child_launch(parent: WorkerAddress, world_size: int, rank: int) -> Launch:
    """Launch parameters of a process that a worker started itself."""
    process = current_process() or enter_from_environment()
    parent_info: WorkerInfo = process.ask_driver("registry.info", parent.get_name())
    if parent_info is None:
        raise SchedulerUsageError(f"parent worker '{parent.get_name()}' is not running")
    address = parent.get_child_address(rank)
    info = dataclasses.replace(parent_info, address=address, rank=rank, group_world_size=world_size)
    launch: Launch = process.ask_driver("cluster.launch_of", parent.get_name())
    placement = dataclasses.replace(launch.placement, rank=rank)
    return dataclasses.replace(launch, world_size=world_size, info=info, placement=placement)


def adopt(worker: Any, launch: Launch) -> None:
    """Make a worker that is being built the current one, and reachable."""
    process = require_process()
    set_current_worker(worker, whole_process=process.runtime == "ray")
    process.waits.add_worker(launch.name)
    if process.runtime == "ray":
        process.endpoint.register("trace.flush", Tracer.flush)
    if launch.traced and process.runtime == "ray":
        Tracer.enable(lambda events: process.endpoint.tell(process.driver, "trace.record", events))
    if launch.log_directory is not None:
        _log_to_file(worker, launch)
    dead = process.ask_driver(
        "registry.register", launch.name, process.endpoint.address, launch.info
    )
    for name, cause in dead.items():
        process.mailbox.mark_dead(name, cause)


class ChannelHost:
    """The process that answers for the channels of a node other than the driver's.

    Those of the driver's node live in the driver.
    """

    def __init__(self) -> None:
        launch: Launch = take_launching()
        self.worker_address = launch.info.address
        adopt(self, launch)


def _log_to_file(worker: Any, launch: Launch) -> None:
    directory = Path(str(launch.log_directory)) / "worker_logs" / launch.group_name
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory / f"rank_{launch.info.rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: str(record.args and record.args[0]) == launch.name)  # type: ignore[index]
    worker.logger.addHandler(handler)
