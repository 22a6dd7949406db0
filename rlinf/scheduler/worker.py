"""The base class of every process of a program."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Self

from rlinf.scheduler.accelerators import AcceleratorType, AcceleratorUtil
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.channel import Channel
from rlinf.scheduler.compat.routed_messages import RoutedMessaging
from rlinf.scheduler.compat.worker_members import WorkerMembers
from rlinf.scheduler.errors import SchedulerUsageError, SchedulerValueError
from rlinf.scheduler.hardware import HardwareInfo
from rlinf.scheduler.messaging import Messaging
from rlinf.scheduler.process import (
    current_worker,
    require_process,
    take_launching,
    waiting_launch,
)
from rlinf.scheduler.profiler import profiled_range
from rlinf.scheduler.runtime.attach import adopt, child_launch
from rlinf.scheduler.runtime.launch import Launch, register_extensions
from rlinf.scheduler.services.tracer import Tracer, within
from rlinf.scheduler.worker_group import WorkerGroup, WorkerGroupFuncResult

__all__ = ["Worker", "WorkerGroup", "WorkerGroupFuncResult"]

logger = logging.getLogger("rlinf")


class WorkerTimers:
    """Timers of a worker of a group; durations of a tag add up until they are popped."""

    def __init__(self, group: str) -> None:
        self.__group = group
        self.__durations: dict[str, float] = {}
        self.__durations_lock = threading.Lock()

    @contextmanager
    def worker_timer(self, tag: str | None = None, trace: bool = True) -> Iterator[None]:
        """Time a block under a tag; without one, under the name of the calling method. ``trace``
        it too, where the cluster is traced; a profiler shows it where one records."""
        if tag is None:
            # Two frames up: contextlib's __enter__, then the caller.
            tag = sys._getframe(2).f_code.co_name
        traced = Tracer.trace_span(tag, cat=self.__group) if trace else nullcontext()
        with traced, profiled_range(tag):
            begin = time.perf_counter()
            try:
                yield
            finally:
                seconds = time.perf_counter() - begin
                with self.__durations_lock:
                    self.__durations[tag] = self.__durations.get(tag, 0.0) + seconds

    def pop_execution_time(self, tag: str) -> float:
        """Seconds of a tag since it was last popped; SchedulerValueError for an unknown tag."""
        with self.__durations_lock:
            if tag not in self.__durations:
                raise SchedulerValueError(
                    f"no duration was recorded for tag '{tag}'; recorded: "
                    f"{sorted(self.__durations)}. Time it with @Worker.timer('{tag}') or "
                    f"worker_timer('{tag}')."
                )
            return self.__durations.pop(tag)

    def _pop_recorded_time(self, tag: str) -> float | None:
        """The same; None for an unknown tag."""
        with self.__durations_lock:
            return self.__durations.pop(tag, None)

    def pop_execution_times(self) -> dict[str, float]:
        """Seconds of every tag since they were last popped."""
        with self.__durations_lock:
            durations, self.__durations = self.__durations, {}
            return durations

    @staticmethod
    def timer(
        tag: str | None = None, trace: bool = True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that times a method, plain or async, under a tag or its own name."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            name = tag or function.__name__
            return within(lambda arguments: arguments[0].worker_timer(name, trace), function)

        return decorate


class WorkerMeta(type):
    """Attributes of the class itself, readable on the driver and in workers."""

    _rlinf_unseen: frozenset[str] = frozenset()
    """Private coroutines of an actor's class that has no public ones."""

    def __dir__(cls) -> Iterator[str]:
        """Names, without those of this class: Ray reads all of an actor's class before it is built.

        It would import torch into each worker and count the devices of its node, not its own; and
        of a class with any coroutine it would run all methods on an event loop, where none of them
        may start one.
        """
        found_out = {
            name for name, value in vars(WorkerMeta).items() if isinstance(value, property)
        }
        unseen = found_out | cls._rlinf_unseen
        return (name for name in super().__dir__() if name not in unseen)

    @property
    def current_worker(cls) -> Worker | None:
        """The worker that this thread or process runs; None on the driver."""
        return current_worker()

    @property
    def accelerator_type(cls) -> AcceleratorType:
        """Kind of the accelerators that this process sees."""
        worker = current_worker()
        return worker.hardware_type if worker else AcceleratorUtil.get_accelerator_type()

    @property
    def torch_platform(cls) -> ModuleType | None:
        """Module like ``torch.cuda`` for this process's accelerators; None on the CPU."""
        return AcceleratorUtil.get_torch_platform(cls.accelerator_type)

    @property
    def torch_device_type(cls) -> str | None:
        """Device string of torch, such as ``cuda``; None on the CPU."""
        return _device_type(cls.accelerator_type)


class Worker(Messaging, RoutedMessaging, WorkerMembers, WorkerTimers, metaclass=WorkerMeta):
    """One process of a worker group (on the ``local`` runtime: one thread).

    Subclass it, call ``super().__init__()``, and launch it with
    ``W.create_group(...).launch(cluster, ...)``. Every public method is then a method of the group.

    Args:
        parent_address: In a process that a worker started itself: that worker.
        world_size: Number of such children.
        rank: Rank of this child.

    Raises:
        SchedulerUsageError: Built without a launch, or launched, and given a parent.
    """

    logger = logger
    _rlinf_launch: Launch  # once it is built

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """A worker that knows already which one it is, before any line of its ``__init__``."""
        worker = super().__new__(cls)
        if (launch := waiting_launch()) is not None:
            worker._rlinf_tell(launch)
        return worker

    def __init__(
        self,
        parent_address: WorkerAddress | None = None,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        launch: Launch | None = take_launching()
        if launch is not None and parent_address is not None:
            raise SchedulerUsageError(
                f"worker '{launch.name}' was launched in a group, which names it, so it takes no "
                f"parent_address (got '{parent_address.get_name()}'). Leave that out: only a "
                "process that a worker started itself gives it."
            )
        if parent_address is not None:
            launch = child_launch(parent_address, world_size or 1, rank or 0)
            self._rlinf_tell(launch)
        if launch is None:
            raise SchedulerUsageError(
                "You may have mistakenly initialized the Worker class directly without "
                "`create_group` and `launch`. A worker runs in a process of its own: use "
                f"`{type(self).__name__}.create_group(...).launch(cluster, ...)`."
            )
        WorkerTimers.__init__(self, launch.info.address.root_group_name)
        Messaging.__init__(self)
        adopt(self, launch)

    def _rlinf_tell(self, launch: Launch) -> None:
        """Tell a worker which one it is, and let what extends this process register."""
        placement = launch.placement
        self._worker_info = launch.info
        self._worker_address = launch.info.address
        self._worker_name = launch.name
        self._group_name = launch.info.address.root_group_name
        self._rank = launch.info.rank
        self._world_size = launch.info.group_world_size
        self._cluster_node_rank = placement.cluster_node_rank
        self._local_accelerator_rank = placement.local_accelerator_rank
        self._node_local_rank = placement.local_rank
        self._node_local_world_size = placement.local_world_size
        self.global_accelerator_ids = list(launch.info.available_accelerators)
        register_extensions(again=False)

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup:
        """A group of this class that can be launched; the arguments go to ``__init__``."""
        return WorkerGroup(cls, args, kwargs)

    @staticmethod
    def _load_user_extensions() -> None:
        """Import the module that ``RLINF_EXT_MODULE`` names and call its ``register()``."""
        register_extensions()

    @property
    def worker_address(self) -> WorkerAddress:
        """Address of this worker."""
        return self._worker_address

    @property
    def worker_info(self) -> WorkerInfo:
        """What others are told about this worker."""
        return self._worker_info

    @property
    def current_worker(self) -> Worker:
        """This worker."""
        return self

    @property
    def has_accelerator(self) -> bool:
        """Whether devices are assigned to this worker."""
        return self._local_accelerator_rank >= 0 and bool(self.global_accelerator_ids)

    @property
    def hardware_type(self) -> AcceleratorType:
        """Kind of this worker's devices."""
        return self._worker_info.accelerator_type

    accelerator_type = hardware_type

    @property
    def torch_platform(self) -> ModuleType | None:
        """Module like ``torch.cuda`` for this worker's devices; None on the CPU."""
        return AcceleratorUtil.get_torch_platform(self.hardware_type)

    @property
    def torch_device_type(self) -> str | None:
        """Device string of torch, such as ``cuda``; None on the CPU."""
        return _device_type(self.hardware_type)

    @property
    def hardware_infos(self) -> list[HardwareInfo]:
        """Other hardware that is assigned to this worker, such as robots."""
        return self._worker_info.hardware_infos

    def get_name(self) -> str:
        """Name of this worker, ``group:rank``."""
        return self._worker_name

    @staticmethod
    def check_worker_alive(worker_name: str) -> bool:
        """Whether a worker was launched and did not die."""
        return bool(require_process().ask_driver("registry.alive", worker_name))

    def create_channel(
        self,
        channel_name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
    ) -> Channel:
        """Create a channel, or connect to the one of that name."""
        return Channel.create(channel_name, maxsize, distributed, node_rank, local)

    def connect_channel(self, channel_name: str) -> Channel:
        """Connect to a channel that exists."""
        return Channel.connect(channel_name, self)

    def log_debug(self, msg: object) -> None:
        """Log at level DEBUG."""
        self._rlinf_log(logging.DEBUG, msg)

    def log_info(self, msg: object) -> None:
        """Log at level INFO."""
        self._rlinf_log(logging.INFO, msg)

    def log_warning(self, msg: object) -> None:
        """Log at level WARNING."""
        self._rlinf_log(logging.WARNING, msg)

    def log_error(self, msg: object) -> None:
        """Log at level ERROR."""
        self._rlinf_log(logging.ERROR, msg)

    def _rlinf_log(self, level: int, message: object) -> None:
        logger.log(level, "%s: %s", self._worker_name, message, stacklevel=3)


def _device_type(accelerator_type: AcceleratorType) -> str | None:
    """Device string of an accelerator; None on the CPU, also where its cores act as devices."""
    if accelerator_type is AcceleratorType.CPU_SLOT:
        return None
    return AcceleratorUtil.get_device_type(accelerator_type)
