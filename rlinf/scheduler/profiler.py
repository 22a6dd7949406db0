"""External profilers: the command that wraps a worker, its capture window, named ranges in it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.scheduler.cluster_sections import ProfilingConfig

PROFILERS = {"nsight": "nsys", "rocprof_sys": "rocprof-sys-python"}
"""Program of each backend."""

_platform: Any = None  # of torch, whose capture window is open


def profiled_command(python: str, worker_name: str, config: ProfilingConfig | None) -> str:
    """Interpreter command of a worker, behind a profiler where its group is to be profiled."""
    if config is None or not config.enabled:
        return python
    given = config.worker_groups
    groups = [given] if isinstance(given, str) else given or ["all"]
    if {"all", worker_name.partition(":")[0].lower()}.isdisjoint(map(str.lower, groups)):
        return python
    report = Path(config.output_dir or ".").resolve() / worker_name.replace(":", "_")
    return shlex.join([*_COMMANDS[config.backend](report, config), python])


def _nsight(report: Path, config: ProfilingConfig) -> list[str]:
    """Nsight Systems (``nsys profile``)."""
    options: dict[str, Any] = {"force-overwrite": "true"}
    if config.options.keys().isdisjoint({"o", "output"}):
        options["output"] = report
    if config.steps is not None:  # else it records all, whatever `Worker.start_profile` says
        options |= {"capture-range": "cudaProfilerApi", "capture-range-end": "stop"}
    return [PROFILERS["nsight"], "profile", *_words({**options, **config.options}, config.flags)]


def _rocprof_sys(report: Path, config: ProfilingConfig) -> list[str]:
    """ROCm Systems Profiler, which takes its output directory from the environment."""
    environment = {"OUTPUT_PATH": report.parent, "OUTPUT_PREFIX": report.name, "TIME_OUTPUT": "OFF"}
    variables = [f"ROCPROFSYS_{name}={value}" for name, value in environment.items()]
    words = _words(config.options, config.flags)
    return ["env", *variables, PROFILERS["rocprof_sys"], *words, "--"]


_COMMANDS: Mapping[str, Callable[[Path, ProfilingConfig], list[str]]] = {
    "nsight": _nsight,
    "rocprof_sys": _rocprof_sys,
}


def _words(options: Mapping[str, Any], flags: list[str]) -> list[str]:
    """Options in a command: ``-t value`` where the name is a letter, else ``--trace=value``."""
    words = []
    for name, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words += [f"-{name}", text] if len(name) == 1 else [f"--{name}={text}"]
    names = [flag.lstrip("-") for flag in flags]
    return words + [f"-{name}" if len(name) == 1 else f"--{name}" for name in names]


def open_window(platform: Any) -> None:
    """Let the profiler record this process, where ``torch.cuda`` or its kind can; once."""
    global _platform  # noqa: PLW0603 - a process has one profiler
    start = getattr(getattr(platform, "profiler", None), "start", None)
    if start is not None and _platform is None:
        start()
        _platform = platform


def close_window() -> None:
    """Let the profiler record no more."""
    global _platform  # noqa: PLW0603
    if _platform is not None:
        _platform.profiler.stop()
        _platform = None


@contextmanager
def profiled_range(label: str) -> Iterator[None]:
    """Name a block in what the profiler records; nothing while it does not."""
    marks = getattr(_platform, "nvtx", None)
    if marks is None:
        yield
        return
    marks.range_push(label)
    try:
        yield
    finally:
        marks.range_pop()
