"""Memory of processes as the kernel counts it, shared pages divided among those that share them.

What a process holds is its PSS: private pages, and of each shared page (libraries, shared memory)
its share. The kernel remembers a peak for the RSS alone, which counts shared pages whole. The peak
that is given here is ``PSS + (peak RSS - RSS)``: what the process held at its fullest beyond now
is taken for its own. It is exact while the shared part does not change, needs no sampling, and
misses nothing however short it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from rlinf.processes.allocator import return_freed_memory

_KIB = 1024
_FULL = ("MemoryError", "OutOfMemoryError", "out of memory", "can't allocate memory",
         "annot allocate memory", "ALLOC_FAILED")  # fmt: skip
"""In what errors say: of Python and numpy, and of torch and its libraries."""
_SAMPLE_SECONDS = 0.005


def tells_of_full_memory(text: str) -> bool:
    """Whether an error, or the end of its trace, says that a machine or a device has no room."""
    return any(words in text for words in _FULL)


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process [bytes]."""

    pid: int
    parent: int
    command: tuple[str, ...]
    now: int
    peak: int
    """The most that it held since :func:`reset_peaks`, or since its start."""


def process_memory(pid: int) -> ProcessMemory:
    """Memory of one process, or a ProcessLookupError where there is no such any more."""
    try:
        status = _fields(Path(f"/proc/{pid}/status"))
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
        process = psutil.Process(pid)
        command, parent = tuple(process.cmdline()), process.ppid()
    except (OSError, psutil.Error) as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    if "VmRSS" not in status or "Pss" not in rollup:
        raise ProcessLookupError(f"process {pid} has ended")
    now = rollup["Pss"]
    peak = now + max(0, status["VmHWM"] - status["VmRSS"])
    return ProcessMemory(pid, parent, command, now, peak)


def tree_memory(pid: int | None = None) -> list[ProcessMemory]:
    """Memory of a process (by default this one) and of all that it started, itself first."""
    found = []
    for member in (pid or os.getpid(), *_descendants(pid or os.getpid())):
        with suppress(ProcessLookupError):
            found.append(process_memory(member))
    return found


def reset_peaks(pid: int | None = None) -> None:
    """Let the peaks of a process and of everything that it started begin anew."""
    for member in (pid or os.getpid(), *_descendants(pid or os.getpid())):
        with suppress(OSError):
            Path(f"/proc/{member}/clear_refs").write_text("5", encoding="ascii")


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name of the lines ``Name:   123 kB`` of a file of the kernel."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * _KIB
    return found


@dataclass(frozen=True)
class Held:
    """What was held during a :class:`MemoryWatch`: the most, and at its end [bytes]."""

    peak: int = 0
    resident: int = 0


class MemoryWatch:
    """Measures the memory that a part of a program holds; a context manager.

    On an accelerator (``platform`` is torch's module for it, ``number`` the device, None the
    current one) it is what torch allocated there.
    Without one, and with a process of its own, it is that of the process and all that it started.
    Where several workers are threads of one process, theirs cannot be told apart: measured is the
    growth of the process while the part runs, sampled every 5 ms, with that of all parts that run
    at the same time.
    """

    def __init__(
        self, *, own_process: bool, platform: Any = None, number: int | None = None
    ) -> None:
        self._own, self._number = own_process, number
        self._device = _in_use(platform)
        self._stop = threading.Event()
        self._most = 0
        self._begin = 0
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> MemoryWatch:
        if self._device is not None:
            self._device.reset_peak_memory_stats(self._number)
            return self
        return_freed_memory()
        if self._own:
            reset_peaks()
        else:
            self._begin = self._most = _own_rss()
            self._sampler = threading.Thread(target=self._sample, name="memory", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()

    def held(self) -> Held:
        """What was held since the beginning, up to now."""
        if self._device is not None:
            most = self._device.max_memory_allocated(self._number)
            return Held(most, self._device.memory_allocated(self._number))
        self._most = max(self._most, _own_rss())
        return_freed_memory()
        if self._own:
            processes = tree_memory()
            return Held(sum(p.peak for p in processes), sum(p.now for p in processes))
        return Held(self._most - self._begin, max(0, _own_rss() - self._begin))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, _own_rss())


def _own_rss() -> int:
    """RSS of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _in_use(platform: Any) -> Any:
    """Torch's module for an accelerator, such as ``torch.cuda``, where this process uses it."""
    return platform if platform is not None and platform.is_initialized() else None


def accelerator_memory(platform: Any, numbers: Sequence[int] | None = None) -> list[int]:
    """Memory of accelerators [bytes], by their numbers in this process, None: of all that it sees;
    empty on a CPU."""
    device = _in_use(platform)
    if device is None:
        return []
    wanted = range(device.device_count()) if numbers is None else numbers
    return [int(device.mem_get_info(number)[1]) for number in wanted]


class TreeWatch:
    """Peaks of a process and of everything that it starts, also of what ends before the watch does.

    A context manager. Every process keeps its own peak, which is read every ``interval`` seconds,
    so that nothing is missed but the last moment of a process that ends.
    """

    def __init__(self, pid: int | None = None, *, interval: float = 0.2) -> None:
        self._pid = pid or os.getpid()
        self._interval = interval
        self._stop = threading.Event()
        self._found: dict[int, ProcessMemory] = {}
        self.together = 0
        """The most that all processes of a reading held, each at its peak up to then [bytes]."""
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> TreeWatch:
        reset_peaks(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def processes(self) -> list[ProcessMemory]:
        """The largest peak of each process."""
        return list(self._found.values())

    def _run(self) -> None:
        while not self._stop.is_set():
            self._read()
            self._stop.wait(self._interval)
        self._read()

    def _read(self) -> None:
        alive = tree_memory(self._pid)
        for process in alive:
            known = self._found.get(process.pid)
            peak = max(process.peak, 0 if known is None else known.peak)
            self._found[process.pid] = replace(process, peak=peak)
        self.together = max(self.together, sum(self._found[p.pid].peak for p in alive))
