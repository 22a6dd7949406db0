"""Several placements of one recipe, each in a process of its own, that train in turns."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from rlinf.cli.tasks import read_config
from rlinf.monitor.run_directory import RunDirectory

Rows = list[tuple[float, dict[str, float]]]
"""Seconds and metrics of steps."""


class Turns:
    """Processes that train when asked to, and are idle otherwise.

    Args:
        recipe: File of the recipe.
        modes: Overrides of each mode, as on the command line.
        directory: Where the modes write.
    """

    def __init__(self, recipe: Path, modes: Mapping[str, list[str]], directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._links: dict[str, Any] = {}
        self._processes: list[Any] = []
        for mode, words in modes.items():
            self._links[mode], end = context.Pipe()
            place = directory / f"turns-{mode.replace(' ', '_')}"
            self._processes.append(context.Process(target=_serve, args=(recipe, words, place, end)))
            self._processes[-1].start()
            end.close()  # so that the end of the process is seen here

    def take(self, turns: Sequence[int]) -> dict[str, Rows]:
        """Let every mode train so many steps in each turn, in one order and then in the other.

        A mode that fails says why on the standard error, and ends the others.
        """
        found: dict[str, Rows] = {mode: [] for mode in self._links}
        for number, steps in enumerate(turns):
            modes = list(self._links) if number % 2 else list(reversed(self._links))
            for mode in modes:
                self._links[mode].send(steps)
                found[mode] += self._links[mode].recv()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for link in self._links.values():
            link.close()  # the end of its steps for a mode
        for process in self._processes:
            process.join()


def _serve(recipe: Path, words: list[str], directory: Path, link: Any) -> None:
    torch.set_num_threads(1)
    task, _, config = read_config(str(recipe), words)
    with RunDirectory.create(directory.parent, "turns", path=directory) as place:
        steps = task.load_runner()(config, place, threading.Event()).rehearse(10**9)
        while (count := _asked(link)) is not None:
            rows: Rows = []
            for _ in range(count):
                begin = time.perf_counter()
                _, metrics = next(steps)
                rows.append((time.perf_counter() - begin, metrics))
            link.send(rows)
        steps.close()


def _asked(link: Any) -> int | None:
    """How many steps are asked for; None: no more."""
    try:
        return int(link.recv())
    except EOFError:
        return None
