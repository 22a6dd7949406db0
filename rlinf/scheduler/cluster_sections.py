"""Optional parts of the ``cluster`` section: profiler, tracer, network emulation, hardware."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Mapping
from itertools import product
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rlinf.config.base import StrictModel
from rlinf.errors import UserError
from rlinf.scheduler.address import Delay, SlowLinks, place_of
from rlinf.scheduler.errors import ClusterConfigError, ClusterConfigValueError
from rlinf.scheduler.profiler import PROFILERS
from rlinf.scheduler.rank_text import parse_ranks


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

    only_with: ClassVar = {"output_file": "enable: true"}
    enable: bool = False
    """Whether to record."""
    output_file: str | None = None
    """File to write; None is ``trace/trace_events.jsonl`` in the run directory, or of a program in
    its working directory. A run writes no file anew: resumed, it adds ``_2`` to the name."""


def _worker_names(value: Any, info: ValidationInfo) -> list[str]:
    """Each worker of ``group:ranks``, or of a list of those, by its name."""
    texts = [value] if isinstance(value, str) else value
    what = f"cluster.net_emulation: '{info.field_name}'"
    example = "Write group:ranks, such as rollout:0-3, or a list of those."
    if not isinstance(texts, list | tuple) or not texts:
        raise ClusterConfigValueError(f"{what} names no worker, got {value!r}. {example}")
    names: list[str] = []
    for text in texts:
        group, colon, ranks = str(text).rpartition(":")
        if not group or not colon:
            raise ClusterConfigValueError(f"{what} is no group:ranks, got {text!r}. {example}")
        names += [f"{group}:{rank}" for rank in parse_ranks(ranks, str(info.field_name))]
    return names


_Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_WorkerNames = Annotated[list[str], BeforeValidator(_worker_names)]


class DrawnDelay(StrictModel):
    """A delay that is drawn anew for each message: one of these, in milliseconds."""

    uniform: tuple[_Milliseconds, _Milliseconds] | None = None
    """The least and the most."""
    exponential: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The mean."""
    gaussian: tuple[_Milliseconds, _Milliseconds] | None = None
    """Mean and standard deviation; what is drawn below 0 is 0."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise ClusterConfigValueError(
                "cluster.net_emulation: a delay that is drawn is {uniform: [least, most]}, "
                "{exponential: mean} or {gaussian: [mean, deviation]}, one of them"
            )
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            least, most = self.uniform
            raise ClusterConfigValueError(
                f"cluster.net_emulation: the uniform delay [{least:g}, {most:g}] ends before it "
                f"begins; nearest: [{most:g}, {least:g}]"
            )
        return self

    def delay(self) -> Delay:
        """The same in seconds."""
        if self.uniform is not None:
            least, most = self.uniform
            return Delay((least + most) / 2000, (most - least) / 2000, "uniform")
        if self.gaussian is not None:
            return Delay(self.gaussian[0] / 1000, self.gaussian[1] / 1000, "gaussian")
        return Delay((self.exponential or 0.0) / 1000, distribution="exponential")


class EmulatedDelay(StrictModel):
    """One slow link."""

    src: _WorkerNames
    """Sending workers: ``group:ranks``, such as ``env:0-3``, or a list of those."""
    dst: _WorkerNames
    """Receiving workers, likewise."""
    delay_ms: _Milliseconds | DrawnDelay
    """Time from when a bit is sent to when it arrives, in milliseconds; or how it is drawn for each
    message: ``{uniform: [least, most]}``, ``{exponential: mean}`` or
    ``{gaussian: [mean, deviation]}``."""

    def delay(self) -> Delay:
        """The same in seconds."""
        given = self.delay_ms
        return given.delay() if isinstance(given, DrawnDelay) else Delay(given / 1000)


class EmulatedBandwidth(StrictModel):
    """Workers that share one narrow link to the others."""

    members: _WorkerNames
    """Workers: ``group:ranks`` or a list of those. Each is in one such group at the most."""
    bandwidth_mbps: float = Field(gt=0, allow_inf_nan=False)
    """Bandwidth in megabits per second: of all that they send over slow links together, and again
    of all that they receive."""

    def places(self) -> list[str]:
        """Each of them once, without the suffix ``Group``."""
        return sorted(set(map(place_of, self.members)))


class NetEmulationConfig(StrictModel):
    """Delays and bandwidths of an imagined network between workers.

    What they send each other, and put into or take from channels, arrives as late as it would
    there. A channel is where the worker is that hosts it, or is named as ``channel:0``."""

    enabled: bool = False
    """Whether to emulate."""
    symmetric: bool = True
    """Whether a delay holds in both directions, where the other is not given by itself."""
    crossdc_pairs: list[EmulatedDelay] = Field(default_factory=list)
    """Links with a delay; only these are emulated."""
    bandwidth_groups: list[EmulatedBandwidth] = Field(default_factory=list)
    """Workers behind a shared link."""

    @model_validator(mode="after")
    def _links_are_distinct(self) -> Self:
        if self.enabled and not self.crossdc_pairs:
            raise ClusterConfigValueError(
                "cluster.net_emulation is enabled and names no link in crossdc_pairs, so nothing "
                "would be slow. A link without a delay has delay_ms: 0. Or set enabled to false."
            )
        given: dict[tuple[str, str], Delay] = {}
        for src, dst, delay in self._pairs():
            if given.setdefault((src, dst), delay) != delay:
                raise ClusterConfigValueError(
                    f"cluster.net_emulation.crossdc_pairs gives the link from {src} to {dst} two "
                    "delays. Keep one."
                )
        members = [place for group in self.bandwidth_groups for place in group.places()]
        twice = sorted({name for name in members if members.count(name) > 1})
        if twice:
            raise ClusterConfigValueError(
                f"cluster.net_emulation.bandwidth_groups has {', '.join(twice)} in two groups. A "
                "worker shares one link."
            )
        return self

    def workers(self) -> set[str]:
        """Every worker that is named, ``group:rank``, without the suffix ``Group``."""
        pairs = {name for src, dst, _ in self._pairs() for name in (src, dst)}
        return pairs.union(*(each.places() for each in self.bandwidth_groups))

    def slow_links(self) -> SlowLinks:
        """The links in seconds and bytes."""
        delays = {(src, dst): delay for src, dst, delay in self._pairs()}
        back = {(dst, src): delay for (src, dst), delay in delays.items()}
        shared = [(each.places(), each.bandwidth_mbps * 1e6 / 8) for each in self.bandwidth_groups]
        return SlowLinks(back | delays if self.symmetric else delays, shared)

    def _pairs(self) -> Iterator[tuple[str, str, Delay]]:
        for pair in self.crossdc_pairs:
            for src, dst in product(map(place_of, pair.src), map(place_of, pair.dst)):
                yield src, dst, pair.delay()


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
