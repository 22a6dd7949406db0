"""What a node has to offer: accelerators, CPU slots and robots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ValidationError

from rlinf.scheduler.accelerators import (
    AcceleratorType,
    AcceleratorUtil,
    accelerator_model,
    detect_accelerators,
)
from rlinf.scheduler.cluster_sections import FrankaConfig, cluster_config_error
from rlinf.scheduler.cpu_slots import available_cores, divide_cores
from rlinf.scheduler.errors import ClusterConfigValueError

__all__ = [
    "Accelerator",
    "AcceleratorType",
    "AcceleratorUtil",
    "FrankaConfig",
    "FrankaHWInfo",
    "HardwareInfo",
    "HardwareResource",
    "enumerate_hardware",
    "robots_of_node",
]

_IDENTIFIER = "robot_ip"  # tells robots of a node apart
_NEVER_FROM_ENVIRONMENT = {"node_rank", "controller_node_rank"}


@dataclass(frozen=True)
class HardwareInfo:
    """One piece of hardware of a node."""

    type: str  # `Accelerator` or the name of a robot
    model: str  # for accelerators in the form `NV_GPU:NVIDIA H200`


@dataclass(frozen=True)
class FrankaHWInfo(HardwareInfo):
    """A Franka arm."""

    config: FrankaConfig


@dataclass(frozen=True)
class HardwareResource:
    """All hardware of one kind on a node, by local rank."""

    type: str
    infos: list[HardwareInfo] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.infos)


class Accelerator:
    """The devices on which placements count by default: accelerators or CPU slots."""

    HW_TYPE: ClassVar[str] = "Accelerator"

    @classmethod
    def enumerate(cls, cpu_devices: int | None = None) -> HardwareResource | None:
        """Devices of this machine, None without any.

        With ``cpu_devices`` the cores are divided into that many slots: what is asked for wins over
        GPUs that the machine may have.
        """
        if cpu_devices is not None:
            slots = divide_cores(available_cores(), cpu_devices)
            return cls.resource(
                [f"{AcceleratorType.CPU_SLOT.value}:{len(cores)} cores" for cores in slots]
            )
        accelerator_type, count = detect_accelerators()
        if count == 0:
            return None
        model = f"{accelerator_type.value}:{accelerator_model(accelerator_type)}"
        return cls.resource([model] * count)

    @classmethod
    def resource(cls, models: Sequence[str]) -> HardwareResource:
        """Devices of the given models."""
        return HardwareResource(cls.HW_TYPE, [HardwareInfo(cls.HW_TYPE, m) for m in models])

    @staticmethod
    def type_of(model: str) -> AcceleratorType:
        """Accelerator type of a model in the form ``TYPE:name``, NO_ACCEL for any other text."""
        kind = model.partition(":")[0]
        return AcceleratorType.__members__.get(kind, AcceleratorType.NO_ACCEL)


def enumerate_hardware(
    configs: Sequence[FrankaConfig] = (), cpu_devices: int | None = None
) -> list[HardwareResource]:
    """Everything that this machine offers; ``cpu_devices`` as for :meth:`Accelerator.enumerate`.

    Robots are taken as they are given, by :func:`robots_of_node`; whether an arm answers is checked
    by the adapter that connects to it.
    """
    accelerators = Accelerator.enumerate(cpu_devices)
    resources = [accelerators] if accelerators is not None else []
    kind = FrankaConfig.HW_TYPE
    arms: list[HardwareInfo] = [FrankaHWInfo(kind, kind, config) for config in configs]
    return [*resources, HardwareResource(kind, arms)] if arms else resources


def robots_of_node(
    declared: Sequence[FrankaConfig], environment: Mapping[str, str], node_rank: int | None = None
) -> list[FrankaConfig]:
    """Robots of a node: what ``declared`` leaves out is filled from the node's environment.

    A field is read from the variable of its name in upper case, such as ``ROBOT_IP``, in which a
    comma separates what belongs to several robots. Cameras are shared out evenly. Where nothing is
    declared and ``node_rank`` is given, there are as many robots as ``ROBOT_IP`` has addresses.

    Raises:
        ClusterConfigError: A variable has the wrong number of values, or a wrong one.
    """
    found = {}
    for name in FrankaConfig.model_fields.keys() - _NEVER_FROM_ENVIRONMENT:
        items = [item.strip() for item in environment.get(name.upper(), "").split(",")]
        if any(items):
            found[name] = items
    robots = list(declared)
    if not robots and node_rank is not None:
        robots = [FrankaConfig(node_rank=node_rank)] * len(found.get(_IDENTIFIER, []))
    return [_filled(robot, rank, len(robots), found) for rank, robot in enumerate(robots)]


def _filled(
    robot: FrankaConfig, rank: int, count: int, found: Mapping[str, list[str]]
) -> FrankaConfig:
    """One of ``count`` robots of a node, with what its configuration does not say."""
    said = robot.model_dump(exclude_unset=True)
    read = {
        name: _share(name, items, rank, count) for name, items in found.items() if name not in said
    }
    try:
        return FrankaConfig.model_validate({**read, **said}, strict=False)  # a variable is text
    except ValidationError as error:
        where = f"in the environment of node {robot.node_rank}, in upper case"
        raise cluster_config_error(error, FrankaConfig, where) from None


def _share(name: str, items: list[str], rank: int, count: int) -> str | list[str]:
    """What of a variable is for one of ``count`` robots."""
    if name == "camera_serials":
        each, left = divmod(len(items), count)
        if not left:
            return items[rank * each : (rank + 1) * each]
    elif len(items) == count:
        return items[rank]
    elif len(items) == 1 and name != _IDENTIFIER:
        return items[0]
    raise ClusterConfigValueError(
        f"{name.upper()} has {len(items)} values, separated by commas, but the node has {count} "
        f"robots, in the order of their configuration. Nearest legal: {count} values."
    )
