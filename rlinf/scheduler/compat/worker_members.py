"""What the published class ``Worker`` offers beside its work: look-up, ports, locks, profilers."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from rlinf.scheduler.accelerators import AcceleratorType, AcceleratorUtil
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.cluster_launch import free_ports
from rlinf.scheduler.errors import SchedulerError
from rlinf.scheduler.process import require_process
from rlinf.scheduler.services.leases import DeviceLock

_PORT_ATTEMPTS = 10_000


class WorkerMembers:
    """Properties and methods of ``Worker``."""

    _worker_name: str
    _worker_address: WorkerAddress
    _rank: int
    _world_size: int
    _rlinf_log: Any
    global_accelerator_ids: list[int]
    hardware_type: Any

    @property
    def _accelerator_type(self) -> AcceleratorType:
        """Kind of this worker's devices, as programs pass it to `AcceleratorUtil`."""
        kind: AcceleratorType = self.hardware_type
        return kind

    @property
    def manager_proxy(self) -> WorkerDirectory:
        """Look-up of other workers."""
        return WorkerDirectory()

    @property
    def device_lock(self) -> DeviceLock:
        """Context manager that leases this worker's devices."""
        return DeviceLock(self._worker_name, self.global_accelerator_ids)

    def get_parent_rank(self) -> int:
        """Rank of the worker that started this one, 0 where there is none."""
        return self._worker_address.get_parent_rank()

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """A free port of this node, up to the highest, that no worker of it was given before."""
        process = require_process()
        for port in islice(free_ports(max_port_num), _PORT_ATTEMPTS):
            if process.ask_driver("registry.take_port", process.node_rank, port, self._worker_name):
                return port
        limit = "" if max_port_num is None else f" up to {max_port_num}"
        raise SchedulerError(f"no free port{limit} on node {process.node_rank}")

    def log_on_first_rank(self, msg: object) -> None:
        """Log at level INFO on rank 0 only."""
        if self._rank == 0:
            self._rlinf_log(logging.INFO, msg)

    def log_on_last_rank(self, msg: object) -> None:
        """Log at level INFO on the last rank only."""
        if self._rank == self._world_size - 1:
            self._rlinf_log(logging.INFO, msg)

    def start_profile(self, step_idx: int | None = None) -> None:
        """Open the capture window of an external profiler, where the platform has one."""
        AcceleratorUtil.start_profiling(self._accelerator_type, step_idx)
        self._rlinf_log(logging.DEBUG, f"profile of step {step_idx}")

    def stop_profile(self) -> None:
        """Close the capture window of an external profiler."""
        AcceleratorUtil.stop_profiling(self._accelerator_type)


class WorkerDirectory:
    """Look-up of workers by address."""

    def get_worker_info(self, worker_address: WorkerAddress) -> WorkerInfo | None:
        """Information of a worker, None if there is no such worker."""
        info: WorkerInfo | None = require_process().ask_driver(
            "registry.info", worker_address.get_name()
        )
        return info
