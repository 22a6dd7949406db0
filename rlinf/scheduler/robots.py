"""Robots as hardware of a node: declared in the cluster configuration, scheduled like devices."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError, field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.scheduler.config_errors import cluster_config_error
from rlinf.scheduler.errors import ClusterConfigError, ClusterConfigValueError


class HardwareConfig(StrictModel):
    """One declared piece of hardware."""

    node_rank: int
    """Node that the hardware is attached to."""


class FrankaConfig(HardwareConfig):
    """A Franka arm with its cameras and gripper."""

    HW_TYPE: ClassVar[str] = "Franka"

    robot_ip: str | None = None
    """Address of the arm's controller; None takes it from the controller node."""

    camera_serials: list[str] | None = None
    """Serial numbers of the cameras that watch the arm."""

    camera_type: Literal["realsense", "zed", "lumos"] = "realsense"
    """Camera driver."""

    gripper_type: Literal["franka", "robotiq"] = "franka"
    """Gripper driver."""

    gripper_connection: str | None = None
    """Serial port of a Robotiq gripper, such as ``/dev/ttyUSB0``."""

    controller_node_rank: int | None = None
    """Node that runs the arm's controller; None runs it beside the environment worker."""

    disable_validate: bool = False
    """Whether to skip the check that the arm and its cameras answer."""

    @field_validator("robot_ip")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ClusterConfigValueError(
                    f"'robot_ip' in franka config must be a valid IP address, got '{value}'. "
                    "Expected a form such as 192.168.0.10."
                ) from None
        return value


HARDWARE_CONFIGS: Mapping[str, type[HardwareConfig]] = MappingProxyType(
    {FrankaConfig.HW_TYPE: FrankaConfig}
)


class NodeHardwareConfig(StrictModel):
    """The declared hardware of one node group; all of one kind."""

    type: str
    """Kind of the hardware, such as ``Franka``."""

    configs: list[HardwareConfig]
    """One entry per piece of hardware."""

    @model_validator(mode="before")
    @classmethod
    def _build_configs(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("configs"), list):
            return data
        config_class = _config_class(str(data.get("type")))
        return {**data, "configs": [_build(config_class, item) for item in data["configs"]]}

    @model_validator(mode="after")
    def _no_duplicates(self) -> Self:
        for index, config in enumerate(self.configs):
            if config in self.configs[:index]:
                raise ClusterConfigError(
                    f"Duplicate hardware configs found in node hardware config: {config!r} appears "
                    "twice. Every entry is one piece of hardware; remove one of them."
                )
        return self


def _config_class(hardware_type: str) -> type[HardwareConfig]:
    found = HARDWARE_CONFIGS.get(hardware_type)
    if found is None:
        nearest = difflib.get_close_matches(hardware_type, HARDWARE_CONFIGS, n=1, cutoff=0.0)
        raise ClusterConfigValueError(
            f"Unsupported hardware type: '{hardware_type}'. Supported types: "
            f"{list(HARDWARE_CONFIGS)}; nearest: '{nearest[0]}'."
        )
    return found


def _build(config_class: type[HardwareConfig], item: Any) -> HardwareConfig:
    if isinstance(item, config_class):
        return item
    if not isinstance(item, Mapping):
        raise ClusterConfigError(
            f"Each hardware config must be a dictionary, got {type(item).__name__}: {item!r}. "
            "Expected for example {node_rank: 0}."
        )
    try:
        return config_class.model_validate(dict(item))
    except ValidationError as error:
        where = "in cluster node_group hardware yaml config"
        raise cluster_config_error(error, config_class, where) from None
