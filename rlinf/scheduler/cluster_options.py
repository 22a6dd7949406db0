"""Optional parts of the ``cluster`` section: profiler, tracer, network emulation."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rlinf.config.base import StrictModel
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
