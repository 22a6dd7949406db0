"""Which differences of memory can matter, so that options differ in no other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.options import NodeOptions
from rlinf.planner.search.problem import Problem

# Sums of memory that are told apart, at most; with more, memory is compared as it is.
MOST_SUMS = 4096


@dataclass(frozen=True)
class MemoryOfOthers:
    """What other nodes may keep on a device while one runs.

    A node fits beside some of the others or it does not; how many bytes are left over is of no
    interest. Its memory is therefore raised to the next amount at which the answer changes.

    Args:
        amounts: Per kind of device, ascending, the memory that each set of others leaves.
        plenty: [K] whether any nodes fit together in any way.
    """

    amounts: tuple[Floats, ...]
    plenty: NDArray[np.bool_]

    def relevant(self, peak: Floats, idle: Floats) -> tuple[Floats, Floats]:
        """[N, K] the memory of options, without differences that cannot matter."""
        raised = [self.raised(peak[:, kind], kind) for kind in range(peak.shape[1])]
        peak = np.stack(raised, axis=1)
        return np.where(self.plenty, 0.0, peak), np.where(self.plenty, 0.0, idle)

    def raised(self, peak: Floats, kind: int) -> Floats:
        """[N] the least amount that holds each peak, of one kind of device; or else the peak."""
        amounts = self.amounts[kind]
        if len(amounts) == 0:
            return peak
        index = np.searchsorted(amounts, peak)
        above = amounts[np.minimum(index, len(amounts) - 1)]
        return np.where(index < len(amounts), above, peak)


def memory_of_others(
    problem: Problem, tables: Mapping[str, NodeOptions]
) -> dict[str, MemoryOfOthers]:
    """What memory can matter for each node, from all ways to run each with all items."""
    memory = problem.memory()
    peak = {name: table.peak.max(axis=0) for name, table in tables.items()}
    kept = {name: table.idle.max(axis=0) for name, table in tables.items()}
    every = np.sum(list(kept.values()), axis=0)
    plenty = np.logical_and.reduce([peak[n] + every - kept[n] <= memory for n in tables])
    found = {}
    for name in tables:
        others = [table for other, table in tables.items() if other != name]
        amounts = tuple(
            np.unique(memory[kind] - _sums([np.unique(t.idle[:, kind]) for t in others]))
            for kind in range(len(memory))
        )
        found[name] = MemoryOfOthers(amounts, plenty)
    return found


def _sums(kept: list[Floats]) -> Floats:
    """All sums of one value, or none, of each node."""
    choices = [np.unique(np.append(values, 0.0)) for values in kept]
    count = int(np.prod([len(values) for values in choices]))
    if count > MOST_SUMS:
        return np.zeros(0)
    return np.array([sum(values) for values in itertools.product(*choices)])
