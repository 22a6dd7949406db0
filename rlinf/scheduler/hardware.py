"""What a node has to offer: accelerators, CPU slots and robots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rlinf.scheduler.accelerators import (
    AcceleratorType,
    AcceleratorUtil,
    accelerator_model,
    detect_accelerators,
)
from rlinf.scheduler.cpu_slots import available_cores, divide_cores

if TYPE_CHECKING:  # what reads configurations takes long to import, and workers do not need it
    from rlinf.scheduler.cluster_sections import FrankaConfig

__all__ = [
    "Accelerator",
    "AcceleratorType",
    "AcceleratorUtil",
    "FrankaHWInfo",
    "HardwareInfo",
    "HardwareResource",
    "enumerate_hardware",
]


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

    Robots are taken as ``robots_of_node`` of the runtimes gives them; whether an arm answers is
    checked by the adapter that connects to it.
    """
    accelerators = Accelerator.enumerate(cpu_devices)
    resources = [accelerators] if accelerators is not None else []
    arms: list[HardwareInfo] = [
        FrankaHWInfo(config.HW_TYPE, config.HW_TYPE, config) for config in configs
    ]
    return [*resources, HardwareResource(arms[0].type, arms)] if arms else resources
