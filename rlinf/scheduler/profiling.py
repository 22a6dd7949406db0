"""External profilers around worker processes (SPEC: ``cluster.profiling``).

The command lines follow the profilers' documentation and have **not been run** for lack of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlinf.scheduler.cluster_options import ProfilingConfig


def profiled_command(python: str, worker_name: str, config: ProfilingConfig | None) -> str:
    """Interpreter command of a worker, behind a profiler where its group is to be profiled."""
    if config is None or not config.enabled or not _selected(worker_name, config):
        return python
    directory = Path(config.output_dir or ".").resolve()
    report = directory / worker_name.replace(":", "_")
    options = [f"--{name}={value}" for name, value in config.options.items()]
    flags = [f"--{flag.lstrip('-')}" for flag in config.flags]
    return " ".join([_COMMANDS[config.backend](report), *options, *flags, python])


def _selected(worker_name: str, config: ProfilingConfig) -> bool:
    given = config.worker_groups
    groups = [given] if isinstance(given, str) else given or ["all"]
    names = {group.lower() for group in groups}
    return "all" in names or worker_name.partition(":")[0].lower() in names


def _nsight(report: Path) -> str:
    return f"nsys profile --output={report} --force-overwrite=true"


def _rocprof(report: Path) -> str:
    return f"rocprof-sys-python --output={report} --"


_COMMANDS: dict[str, Callable[[Path], str]] = {"nsight": _nsight, "rocprof_sys": _rocprof}
