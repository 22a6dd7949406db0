"""Several settings of one recipe, each in a process of its own, that train in turns.

Two of them may have their turns at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from rlinf.cli.tasks import read_config
from rlinf.flow.planning_traits import WARM_UP_STEPS
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner.measure import StepRecorder
from rlinf.planner.planned import legal_trials
from rlinf.planner.profiling import MeasuredTrial, trial_recorder
from rlinf.runners.run import Run


@dataclass(frozen=True)
class Setting:
    """What one process trains.

    Args:
        recipe: File of the recipe.
        words: Overrides, as on the command line.
        trial: Number of the trial of the recipe that is run; None: the recipe as overridden.
    """

    recipe: Path
    words: list[str]
    trial: int | None = None

    def read(self) -> tuple[Any, str, Any]:
        """Task, label and config."""
        task, _, config = read_config(str(self.recipe), self.words)
        if self.trial is None:
            return task, "the recipe", config
        return task, *list(legal_trials(config))[self.trial]


@dataclass
class Taken:
    """What the steps of a setting took.

    Args:
        seconds: Of steps that count.
        metrics: Of every step.
        recorder: What the components took, in steps that count.
    """

    seconds: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    recorder: StepRecorder | None = None

    def trial(self, setting: Setting) -> MeasuredTrial:
        """As one of the trials that make a profile."""
        assert self.recorder is not None
        return MeasuredTrial(setting.read()[2], self.recorder, statistics.median(self.seconds))


class Turns:
    """Processes that train when asked to, and are idle otherwise.

    Args:
        settings: By name.
        directory: Where they write.
    """

    def __init__(self, settings: Mapping[str, Setting], directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._links: dict[str, Any] = {}
        self._processes: list[Any] = []
        for number, (name, setting) in enumerate(settings.items()):
            self._links[name], end = context.Pipe()
            place = directory / f"turns-{number}"
            self._processes.append(context.Process(target=_serve, args=(setting, place, end)))
            self._processes[-1].start()
            end.close()  # so that the end of the process is seen here

    def take(
        self, turns: int, steps: int, *, at_once: Iterable[tuple[str, ...]] = ()
    ) -> dict[str, Taken]:
        """Let every setting warm up, and then train so many steps in each turn.

        The first step of a turn finds the caches of the processor full of others' data, and does
        not count. Turns go in one order and then in the other. A setting that fails says why on the
        standard error, and ends the others.

        Args:
            turns: Of each setting.
            steps: In each turn.
            at_once: Settings that have their turns together.
        """
        parties = [*at_once]
        joined = {name for party in parties for name in party}
        parties += [(name,) for name in self._links if name not in joined]
        for number in range(turns + 1):
            for party in parties if number % 2 else reversed(parties):
                for name in party:
                    self._links[name].send(steps if number else WARM_UP_STEPS)
                for name in party:
                    self._links[name].recv()
        found = {}
        for name, link in self._links.items():
            link.send(0)
            found[name] = link.recv()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for link in self._links.values():
            link.close()  # the end of its steps for a setting
        for process in self._processes:
            process.join()


def _serve(setting: Setting, directory: Path, link: Any) -> None:
    """Take as many steps as are asked for; answers what all took where none are."""
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what runs say, many times over
    task, label, config = setting.read()
    taken = Taken(recorder=trial_recorder(label, config, task.flow))
    assert taken.recorder is not None
    with RunDirectory.create(directory.parent, "turns", path=directory) as place:
        run = Run(task, config, place, threading.Event())
        with contextlib.closing(run.rehearse(10**9)) as steps:
            while (count := _asked(link)) is not None:
                for number in range(count):
                    warm = len(taken.metrics) >= WARM_UP_STEPS
                    begin = time.perf_counter()
                    report, metrics = next(steps)
                    seconds = time.perf_counter() - begin
                    taken.metrics.append(metrics)
                    if not warm or number:
                        taken.recorder.observe(report, seconds)
                    if warm and number:
                        taken.seconds.append(seconds)
                link.send(None if count else taken)


def _asked(link: Any) -> int | None:
    """How many steps are asked for; None: no more."""
    try:
        return int(link.recv())
    except EOFError:
        return None
