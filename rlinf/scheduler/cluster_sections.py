"""Optional parts of the ``cluster`` section: profiler, tracer, network emulation, hardware."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from types import UnionType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from rlinf.config.base import StrictModel
from rlinf.errors import UserError
from rlinf.scheduler.errors import ClusterConfigError, ClusterConfigValueError
from rlinf.scheduler.profiler import PROFILERS


class ProfilingConfig(StrictModel):
    """A profiler around the processes of some worker groups."""

    backend: str = ""
    """``nsight`` (NVIDIA) or ``rocprof_sys`` (AMD)."""
    enabled: bool = True
    """Whether to profile."""
    worker_groups: list[str] | str | None = None
    """Groups to profile; ``all`` or None takes every group."""
    steps: list[int] | None = None
    """Training steps to capture, counted from 0; None captures all."""
    output_dir: str | None = None
    """Where reports go; None is the run directory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the profiler's command line, ``name: value``."""
    flags: list[str] = Field(default_factory=list)
    """Options of the profiler's command line that take no value."""

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in PROFILERS:
            unknown = f"Unknown profiling backend '{value}'"
            problem = unknown if value else "cluster.profiling.backend must be specified"
            raise ClusterConfigValueError(f"{problem}. Known backends: {list(PROFILERS)}.")
        return value

    @field_validator("steps")
    @classmethod
    def _are_steps(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and any(step < 0 for step in value):
            raise ClusterConfigError(
                f"cluster.profiling.steps must be non-negative, got {value}. Steps count from 0."
            )
        return value


class TracerConfig(StrictModel):
    """A timeline of workers in the Chrome trace format."""

    enable: bool = False
    """Whether to record."""
    output_file: str | None = None
    """File to write; None is ``trace/trace_events.jsonl`` in the run directory."""


class EmulatedDelay(StrictModel):
    """One slow link."""

    src: str
    """Sending workers, ``group:ranks``."""
    dst: str
    """Receiving workers, ``group:ranks``."""
    delay_ms: float = Field(ge=0)
    """Time that a message takes beyond its transfer, in milliseconds."""


class EmulatedBandwidth(StrictModel):
    """Workers that share one narrow link to the others."""

    members: list[str]
    """Workers, ``group:ranks``."""
    bandwidth_mbps: float = Field(gt=0)
    """Bandwidth of the link in megabits per second."""


class NetEmulationConfig(StrictModel):
    """Delays and bandwidths of an imagined network."""

    enabled: bool = False
    """Whether to emulate."""
    symmetric: bool = True
    """Whether a delay holds in both directions."""
    crossdc_pairs: list[EmulatedDelay] = Field(default_factory=list)
    """Links with a delay; only these are emulated."""
    bandwidth_groups: list[EmulatedBandwidth] = Field(default_factory=list)
    """Workers behind a shared link."""


def must_be(kind: type | UnionType, value: object, what: str, hint: str) -> None:
    """Refuse a value of another kind in words; pydantic would name Python's types."""
    if not isinstance(value, kind):
        raise ClusterConfigError(f"{what}, got {type(value).__name__}: {value!r}. {hint}")


def cluster_config_error(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """The exception to raise for what pydantic found when it built ``model``, ``where`` in words.

    A rule of ours that failed inside a validator is returned as it was raised. Otherwise missing
    fields are told first, then unknown ones, then the first value of a wrong type.
    """
    findings = error.errors()
    for finding in findings:
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            return cause
    path = ".".join(str(part) for part in findings[0]["loc"][:-1])
    at = f"{where} at '{path}'" if path else where
    missing = [str(f["loc"][-1]) for f in findings if f["type"] == "missing"]
    if missing:
        return ClusterConfigError(f"Missing fields '{missing}' detected {at}.")
    unknown = {str(f["loc"][-1]) for f in findings if f["type"] == "extra_forbidden"}
    if unknown:
        hint = "Check the spelling against `rlinf explain cluster`."
        if all(len(finding["loc"]) == 1 for finding in findings):
            legal = sorted(model.model_fields)
            near = [difflib.get_close_matches(key, legal, n=1) for key in sorted(unknown)]
            meant = ", ".join(f"'{match[0]}'" for match in near if match)
            hint = (f"Did you mean {meant}? " if meant else "") + f"Valid fields are: {legal}."
        return ClusterConfigError(f"Unknown fields '{unknown}' detected {at}. {hint}")
    first = findings[0]
    key = ".".join(str(part) for part in first["loc"])
    return ClusterConfigError(f"{key} = {first['input']!r} {where}: {first['msg']}.")


class FrankaConfig(StrictModel):
    """A Franka arm with its cameras and gripper.

    What is left out is read on its node from the variable of that name in upper case, such as
    ``ROBOT_IP``; not the ranks of nodes.
    """

    HW_TYPE: ClassVar[str] = "Franka"

    node_rank: int
    """Node that the hardware is attached to."""
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


class NodeHardwareConfig(StrictModel):
    """The declared hardware of one node group; all of one kind."""

    type: str
    """Kind of the hardware: ``Franka``."""
    configs: list[FrankaConfig]
    """One entry per piece of hardware. Empty: as many on each node as ``ROBOT_IP`` there has
    addresses, separated by commas."""

    @field_validator("type")
    @classmethod
    def _is_supported(cls, value: str) -> str:
        if value != FrankaConfig.HW_TYPE:
            raise ClusterConfigValueError(
                f"Unsupported hardware type: '{value}'. Supported: '{FrankaConfig.HW_TYPE}'."
            )
        return value

    @field_validator("configs", mode="before")
    @classmethod
    def _are_mappings(cls, value: Any) -> Any:
        for item in value if isinstance(value, list) else ():
            what = "Each hardware config must be a dictionary"
            must_be(Mapping | FrankaConfig, item, what, "Expected for example {node_rank: 0}.")
        return value

    @field_validator("configs")
    @classmethod
    def _are_distinct(cls, value: list[FrankaConfig]) -> list[FrankaConfig]:
        for index, config in enumerate(value):
            if config in value[:index]:
                raise ClusterConfigError(
                    f"Duplicate hardware configs found in node hardware config: {config!r} appears "
                    "twice. Every entry is one piece of hardware; remove one of them."
                )
        return value
