"""The worst step of a recipe in a process of its own, so that it may run out of memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlinf.errors import RunFailure, UserError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.stage_worker import WorkerPlace
from rlinf.monitor.memory import ProcessMemory, TreeWatch
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner.memory_report import DevicePeak, WorstCase, device_peaks

_LOOK_SECONDS = 0.1
_ACCELERATOR_IS_FULL = ("OutOfMemoryError", "out of memory")
"""In the text of the errors by which torch and its libraries say so."""


class WorstCaseRunner(Protocol):
    """A runner, as far as the preflight is concerned."""

    def run_worst_case(self) -> WorstCase:
        """One training step at its largest, with evaluation and checkpoint."""


RunnerClass = Callable[[Any, RunDirectory, threading.Event], WorstCaseRunner]


@dataclass(frozen=True)
class WorstStep:
    """What the worst step of a recipe held.

    Args:
        processes: The largest peak of each process.
        together: The most that all held at a time [bytes].
        driver: Number of the process that ran it.
        places: Of the workers; empty where it did not end.
        devices: What each accelerator held; empty without accelerators.
        ended: Why it could not be finished: the memory was not enough. None: it was finished.
    """

    processes: list[ProcessMemory]
    together: int
    driver: int
    places: list[WorkerPlace]
    devices: tuple[DevicePeak, ...]
    ended: str | None = None


def measure_worst_step(
    config: PlacedConfig, runner: RunnerClass, flow: Callable[[Any], Flow], most: int
) -> WorstStep:
    """Run the worst step of a recipe in a child process, and watch what it takes.

    The child is ended once it and all that it started hold more than ``most``, so that the rest of
    the machine goes on; should the kernel be quicker, it ends the child.

    Args:
        config: The recipe with its worst case.
        runner: Builds the runner of its task.
        flow: The flow of a config.
        most: Host memory that may be taken [bytes].

    Raises:
        UserError: What the run raised, where its user can correct it.
        RunFailure: The run failed otherwise than for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    answer: tuple[str, Any] | None = None
    # It is this process that makes the directory, as a child that is killed would leave it behind.
    with tempfile.TemporaryDirectory(prefix="rlinf-preflight-") as scratch:
        arguments = (config, runner, flow, there, scratch)
        child = context.Process(target=_run, args=arguments, name="worst step")
        child.start()
        there.close()
        assert child.pid is not None
        with TreeWatch(child.pid) as watch:
            while answer is None and watch.together <= most:
                if here.poll(_LOOK_SECONDS):
                    answer = _received(here)
            too_much = answer is None
            if too_much:
                _end_tree(child.pid)
            child.join()
    kind: str = answer[0] if answer else "lost"
    content: Any = answer[1] if answer else None
    if kind == "refused":
        raise content
    if kind == "failed" and not any(words in content for words in _ACCELERATOR_IS_FULL):
        raise RunFailure(f"the worst step of the recipe failed; the trace ends in\n{content}")
    if kind == "lost" and not too_much and child.exitcode != -signal.SIGKILL:
        raise RunFailure(f"the process of the worst step ended with status {child.exitcode}")
    places, devices = content if kind == "found" else ([], ())
    why = {"lost": "the memory of the host was full", "failed": "that of a device was full"}
    return WorstStep(watch.processes, watch.together, child.pid, places, devices, why.get(kind))


def _received(here: Connection) -> tuple[str, Any]:
    try:
        answer: tuple[str, Any] = here.recv()
    except EOFError:
        return "lost", None
    return answer


def _end_tree(pid: int) -> None:
    """Kill a process and everything that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _run(
    config: PlacedConfig,
    runner: RunnerClass,
    flow: Callable[[Any], Flow],
    there: Connection,
    scratch: str,
) -> None:
    """What the child does; sends what was found, what the user can correct, or the failure."""
    with suppress(OSError):
        # Should the machine run out of memory, this process is to end, and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        path = Path(scratch) / "run"
        with (
            RunDirectory.create(scratch, "preflight", path=path) as directory,
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            found = runner(config, directory, threading.Event()).run_worst_case()
        there.send(("found", (found.places, device_peaks(config, flow(config), found))))
    except UserError as error:
        there.send(("refused", error))
    except Exception:  # noqa: BLE001 - told by the parent, which knows what to make of it
        there.send(("failed", "".join(traceback.format_exc().splitlines(keepends=True)[-30:])))
