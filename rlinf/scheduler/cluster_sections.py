"""Optional parts of the ``cluster`` section: profiler, tracer, network emulation."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.errors import UserError
from rlinf.scheduler.errors import ClusterConfigError, ClusterConfigValueError

PROFILERS = ("nsight", "rocprof_sys")


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
        if not value:
            raise ClusterConfigValueError(
                f"cluster.profiling.backend must be specified (known backends: {list(PROFILERS)})."
            )
        if value not in PROFILERS:
            raise ClusterConfigValueError(
                f"Unknown profiling backend '{value}'. Known backends: {list(PROFILERS)}."
            )
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


def cluster_config_error(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """Return the exception to raise for what pydantic found.

    A rule of ours that failed inside a validator is returned as it was raised. Otherwise missing
    fields are told first, then unknown ones, then the first value of a wrong type.

    Args:
        error: What pydantic found.
        model: Class that was being built; its fields are the legal keys.
        where: Part of the configuration, in words.
    """
    findings = error.errors()
    for finding in findings:
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            return cause
    missing = [str(f["loc"][-1]) for f in findings if f["type"] == "missing"]
    if missing:
        return ClusterConfigError(f"Missing fields '{missing}' detected {_at(findings, where)}.")
    unknown = {str(f["loc"][-1]) for f in findings if f["type"] == "extra_forbidden"}
    if unknown:
        return ClusterConfigError(
            f"Unknown fields '{unknown}' detected {_at(findings, where)}."
            f"{_suggestion(unknown, model, findings)}"
        )
    first = findings[0]
    key = ".".join(str(part) for part in first["loc"])
    return ClusterConfigError(f"{key} = {first['input']!r} {where}: {first['msg']}.")


def _at(findings: list[Any], where: str) -> str:
    path = ".".join(str(part) for part in findings[0]["loc"][:-1])
    return f"{where} at '{path}'" if path else where


def _suggestion(unknown: set[str], model: type[BaseModel], findings: list[Any]) -> str:
    if any(len(finding["loc"]) > 1 for finding in findings):
        return " Check the spelling against `rlinf explain cluster`."
    legal = sorted(model.model_fields)
    near = [difflib.get_close_matches(key, legal, n=1) for key in sorted(unknown)]
    meant = ", ".join(f"'{match[0]}'" for match in near if match)
    return (f" Did you mean {meant}?" if meant else "") + f" Valid fields are: {legal}."


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
