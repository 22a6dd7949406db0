"""Cores, threads, memory, shared memory, disk, accelerators, video encoder, Ray."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlinf.cli.health.packages import Finding, gigabytes, installed
from rlinf.errors import UserError, install_command
from rlinf.planner.cluster_shape import free_memory, total_memory

_SMALL_SHARED_MEMORY = 1e9
_SMALL_MEMORY = 2e9
_SMALL_DISK = 2e9
_FEW_FILES, _MANY_FILES = 1024, 65536
_RAY_SECONDS = 90


def machine_findings(directory: Path) -> Iterator[Finding]:
    """Yield what the machine offers to a run whose files go below ``directory``."""
    yield _cores()
    yield _threads()
    yield _memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _disk(directory)
    yield _open_files()
    yield _accelerators()
    yield _video_encoder()


def _cores() -> Finding:
    usable, present = _usable_cores(), os.cpu_count() or 1
    quota = _cgroup_cores()
    if quota is not None and quota < usable:
        return Finding(
            "cores",
            "warning",
            f"{usable} visible, but the container may use {quota:g}",
            "give the container more cores (docker run --cpus=…), or set "
            f"cluster.cpu_devices_per_node to at most {max(1, int(quota))}",
        )
    pinned = "" if usable == present else f" of {present}; the process is pinned to the others"
    return Finding("cores", "ok", f"{usable}{pinned}")


def _usable_cores() -> int:
    # Only Linux lets a process be pinned to some of the cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_cores() -> float | None:
    """Return the processor quota of the container in cores, if it has one."""
    pairs = (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    )
    for first, second in pairs:
        words = _words_of(first) + (_words_of(second) if second else [])
        if len(words) == 2 and words[0].isdigit() and float(words[1]) > 0:
            return float(words[0]) / float(words[1])
    return None


def _words_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split()
    except OSError:
        return []


def _threads() -> Finding:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY")
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    usable = _usable_cores()
    if threads.isdigit() and int(threads) > usable:
        return Finding(
            "threads",
            "warning",
            f"OMP_NUM_THREADS={threads} on {usable} cores: threads wait for each other",
            f"export OMP_NUM_THREADS={usable}",
        )
    return Finding("threads", "ok", ", ".join(found) or "workers set their own thread counts")


def _memory() -> Finding:
    free = free_memory()
    text = f"{gigabytes(free)} free of {gigabytes(total_memory())}"
    if free < _SMALL_MEMORY:
        return Finding("memory", "warning", text, "end other programs, or use fewer environments")
    return Finding("memory", "ok", text)


def _shared_memory(path: Path) -> Finding:
    fix = "docker run --shm-size=8g …, or: mount -o remount,size=8G /dev/shm"
    if not path.exists():
        return Finding(str(path), "absent", "not on this system; temporary files are used instead")
    if not os.access(path, os.W_OK):
        text = "cannot be written; temporary files are used instead, which are slower on a disk"
        return Finding(str(path), "warning", text, fix)
    free = shutil.disk_usage(path).free
    small = free < _SMALL_SHARED_MEMORY
    return Finding(
        str(path), "warning" if small else "ok", f"{gigabytes(free)} free", fix if small else ""
    )


def _disk(directory: Path) -> Finding:
    name = f"disk at {directory}"
    if not os.access(directory, os.W_OK):
        fix = "run from a folder of yours, or give --run-dir"
        return Finding(name, "failed", "cannot be written", fix)
    free = shutil.disk_usage(directory).free
    small = free < _SMALL_DISK
    fix = "free some space, or give --run-dir on another disk" if small else ""
    return Finding(name, "warning" if small else "ok", f"{gigabytes(free)} free", fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, unbounded = f"at most {soft} per process", resource.RLIM_INFINITY
    if soft == unbounded or soft >= _FEW_FILES:
        return Finding("open files", "ok", "any number" if soft == unbounded else text)
    if hard != unbounded and hard < _FEW_FILES:
        fix = (
            f"docker run --ulimit nofile={_MANY_FILES}; or the administrator allows more than "
            f"{hard} by nofile in /etc/security/limits.conf"
        )
    else:
        fix = f"ulimit -n {_MANY_FILES if hard == unbounded else min(hard, _MANY_FILES)}"
    return Finding("open files", "warning", text, fix)


def _accelerators() -> Finding:
    if not installed("torch"):
        return Finding("accelerators", "failed", "torch is not installed", "pip install torch")
    import torch

    from rlinf.scheduler.accelerators import (
        DEVICE_VARIABLE,
        VENDORS,
        detect_accelerators,
        process_device,
    )

    try:
        process_device()
    except UserError as error:
        return Finding("accelerators", "failed", str(error), f"unset {DEVICE_VARIABLE}")
    kind, count = detect_accelerators()
    platform = VENDORS[kind].torch_platform()
    names = [] if platform is None else [platform.get_device_name(i) for i in range(count)]
    if names:
        return Finding("accelerators", "ok", ", ".join(names))
    if shutil.which("nvidia-smi"):
        return Finding(
            "accelerators",
            "warning",
            f"the machine has nvidia-smi, but torch {torch.__version__} sees no device",
            "reinstall torch in the build for the driver version that nvidia-smi shows",
        )
    return Finding("accelerators", "ok", "none; the cores are divided into slots instead")


def _video_encoder() -> Finding:
    """Encode a few frames and read them back."""
    try:
        import imageio.v2
        import numpy

        frames = [numpy.full((64, 64, 3), shade, numpy.uint8) for shade in range(0, 250, 50)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "test.mp4")
            imageio.v2.mimwrite(path, frames, fps=10, macro_block_size=None)
            count = len(imageio.v2.mimread(path))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fix = "pip install --force-reinstall imageio imageio-ffmpeg"
        return Finding("video encoder", "failed", _one_line(error), fix)
    return Finding("video encoder", "ok", f"{count} frames written and read back as MP4")


def ray_finding() -> Finding:
    """Start a Ray of our own with one core, call a function on it, and end it."""
    if not installed("ray"):
        return Finding("ray start", "absent", "not installed", install_command("ray"))
    program = (
        "import ray\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "print(ray.get(ray.remote(lambda: 'answered').remote()))\n"
        "ray.shutdown()\n"
    )
    fix = "rerun with RAY_BACKEND_LOG_LEVEL=debug and look below /tmp/ray/session_latest/logs"
    try:
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_RAY_SECONDS,
            check=False,
            # The second lets it listen on loopback alone, on every system.
            env={
                **os.environ,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            },
        )
    except subprocess.TimeoutExpired:
        return Finding("ray start", "failed", f"no answer within {_RAY_SECONDS} s", fix)
    if result.returncode == 0 and "answered" in result.stdout:
        return Finding("ray start", "ok", "started, answered, ended")
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return Finding("ray start", "failed", lines[-1], fix)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
