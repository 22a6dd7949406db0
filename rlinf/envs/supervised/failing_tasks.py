"""Tasks whose resets always fail: each env process finds its own, names them, or leaves them out.

A task fails when :data:`RESETS` resets of it failed in the envs of a process and none went well.
What is counted lies in the shared block, by env, so that it outlives the process and the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlinf.envs.supervised.checks import EnvSideFault
from rlinf.errors import RunFailure
from rlinf.processes.shared_block import SharedBlock

RESETS = 3
FAILED, BEGUN, REPLACED = range(3)
"""Columns of ``task_resets`` [N, tasks, 3]: resets that failed, that went well, and episodes of a
task left out that the next task was given."""

_SEEDS = 2**31


class FailingTasks:
    """The book of one process.

    Args:
        rows: Envs of this process.
        descriptions: The tasks in words, or none.
        task_of: The task that an episode of a seed begins in.
        leave_out: Whether the other tasks go on without one whose resets always fail.
        remark: Takes words for the user.
    """

    def __init__(
        self,
        block: SharedBlock,
        rows: Sequence[int],
        descriptions: Sequence[str],
        task_of: Callable[[int], int],
        *,
        leave_out: bool,
        remark: Callable[[str], None],
    ) -> None:
        self._resets, self._rows = block["task_resets"], list(rows)
        self._descriptions = descriptions
        self._task_of = task_of
        self._leave_out, self._remark = leave_out, remark
        self.left_out: frozenset[int] = frozenset()
        self.review()

    def review(self) -> None:
        """Read in the block which tasks are left out."""
        if self._leave_out:
            counts = self._resets[self._rows].sum(axis=0)
            always = (counts[:, FAILED] >= RESETS) & (counts[:, BEGUN] == 0)
            self.left_out = frozenset(np.flatnonzero(always).tolist())

    def task_of(self, seed: int) -> int:
        """The task that the episode of a seed begins in."""
        return self._task_of(seed)

    def next_seed(self, seed: int, row: int) -> int:
        """The first seed from ``seed`` on whose task is not left out; a replaced one is counted.

        Raises:
            RunFailure: No task is left.
        """
        task = self._task_of(seed)
        if task not in self.left_out:
            return seed
        self._resets[row, task, REPLACED] += 1
        for further in range(1, self._resets.shape[1]):
            if self._task_of(other := (seed + further) % _SEEDS) not in self.left_out:
                return other
        raise RunFailure(f"no task is left: every reset of {self._named(self.left_out)} failed")

    def began(self, row: int, task: int) -> None:
        """Count a reset that went well."""
        self._resets[row, task, BEGUN] += 1
        if task in self.left_out:  # its first resets were slower to end than others to fail
            self.review()

    def failed(self, row: int, task: int, seed: int, fault: EnvSideFault) -> bool:
        """Count a reset that failed; whether it helps to find out a task that is to be left out.

        Raises:
            RunFailure: Resets of the task always fail, and none is to be left out.
        """
        self._resets[row, task, FAILED] += 1
        failed, begun, _ = self._resets[self._rows, task].sum(axis=0).tolist()
        if begun or failed < RESETS:
            return self._leave_out and not begun
        what = (
            f"{self._named([task])} could not be reset {failed} times in a row, and never was; "
            f"the last time, with seed {seed}: {fault.reason.value}: {fault.summary}"
        )
        several = self._resets.shape[1] > 1
        if not self._leave_out:
            way_out = "env.train.leave_out_failing_tasks=true goes on without it"
            raise RunFailure(f"{what}; {way_out}" if several else what)
        if not several:
            raise RunFailure(what)
        if task not in self.left_out:
            self._remark(f"{what}; it is left out")
        self.review()
        return True

    def _named(self, tasks: Sequence[int] | frozenset[int]) -> str:
        total = self._resets.shape[1]
        return ", ".join(
            f"task {task} of {total}"
            + (f" ({self._descriptions[task]})" if task < len(self._descriptions) else "")
            for task in sorted(tasks)
        )


def never_began(block: SharedBlock, rows: Sequence[int], row: int) -> bool:
    """Whether a row is in a reset of a task that was never reset in these rows."""
    task = int(block["task"][row])
    begun = block["task_resets"][list(rows), task, BEGUN].any()
    return not (block["begun"][row] or begun)
