"""Which episode an env is in: the next one, its fault, its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlinf.envs.supervised.block import Status, write_record
from rlinf.envs.supervised.checks import EnvSideFault
from rlinf.envs.supervised.failing_tasks import FailingTasks, never_began
from rlinf.envs.supervised.schedule import MAX_ATTEMPTS, EpisodeRules
from rlinf.processes.shared_block import SharedBlock


class Episodes:
    """The episodes of the envs of one process, in their rows of the shared block.

    Args:
        rules: Which one comes next; may be replaced.
        numbers: Global number of the env of each row.
        rows: Rows of this process.
        descriptions: The tasks in words, or none.
        task_of: The task that an episode of a seed begins in.
    """

    def __init__(
        self,
        *,
        block: SharedBlock,
        rules: EpisodeRules,
        numbers: Sequence[int],
        rows: Sequence[int],
        descriptions: Sequence[str],
        task_of: Callable[[int], int],
    ) -> None:
        self._block = block
        self.rules = rules
        self._numbers = numbers
        self._rows = rows
        self._task_of = task_of
        self._faults: list[dict[str, Any]] = []
        self._unplayed: list[dict[str, Any]] = []
        self._remarks: list[str] = []
        self.tasks = FailingTasks(
            block,
            rows,
            descriptions,
            task_of,
            leave_out=rules.leave_out_failing_tasks,
            remark=self.remark,
        )

    def remark(self, words: str) -> None:
        """Report something that the user is to know."""
        self._remarks.append(words)

    def take_report(self) -> dict[str, Any]:
        """Since the last call: faults, listed episodes that never began, and remarks; each where
        there are some."""
        news = {"faults": self._faults, "unplayed": self._unplayed, "remarks": self._remarks}
        found = {name: each for name, each in news.items() if each}
        if found:
            self._faults, self._unplayed, self._remarks = [], [], []
        return found

    def enter_next(self, row: int) -> bool:
        """Set the counters of the next episode; False when there is none.

        Raises:
            RunFailure: All tasks are left out.
        """
        block, listed = self._block, self.rules.episodes is not None
        env, epoch = self._numbers[row], int(block["epoch"][row])
        serial = int(block["serial"][row])
        while True:
            episode = self.rules.episode(env, epoch, int(block["index"][row]), serial)
            if episode is None:
                block["status"][row] = Status.EXHAUSTED
                return False
            number, seed = episode
            if not listed:
                seed = self.tasks.next_seed(seed, row)
            task = self._task_of(seed)
            for name, value in (("episode_id", number), ("seed", seed), ("task", task)):
                block[name][row] = value
            block["begun"][row] = False
            if not listed or task not in self.tasks.left_out:
                break
            self._pass_over(row)
        block["serial"][row] = serial + 1
        for name in ("steps", "episode_return", "success_once", "success_now", "fail_once"):
            block[name][row] = 0
        block["status"][row] = Status.RUNNING
        return True

    def began(self, row: int) -> None:
        """The reset of the present episode went well."""
        self._block["begun"][row] = True
        self.tasks.began(row, int(self._block["task"][row]))

    def fails_to_begin(self, row: int, fault: EnvSideFault) -> bool:
        """The reset of the present episode failed; see :meth:`FailingTasks.failed`.

        Raises:
            RunFailure: Resets of its task always fail, and none is to be left out.
        """
        task, seed = int(self._block["task"][row]), int(self._block["seed"][row])
        return self.tasks.failed(row, task, seed, fault)

    def note_fault(self, row: int, fault: EnvSideFault, *, known: bool = False) -> None:
        """Close the episode of a row as invalid, unless it is one of a list to be tried again.

        Args:
            known: The vector env has noted the fault itself.
        """
        block, listed = self._block, self.rules.episodes is not None
        if not known:
            self._faults.append(
                {
                    "row": row,
                    "reason": fault.reason.value,
                    "detail": fault.detail,
                    "episode": int(block["episode_id"][row]),
                    "never_began": never_began(block, self._rows, row),
                }
            )
        block["attempt"][row] += 1
        if listed and block["attempt"][row] < MAX_ATTEMPTS:
            return
        if listed and not block["begun"][row]:
            self._pass_over(row)
            return
        if block["begun"][row] and not block["recorded"][row]:
            self.record(row, valid=False)
        block["index"][row] += 1
        block["attempt"][row] = 0

    def record(self, row: int, *, valid: bool) -> None:
        """Write down the episode of a row, as it is now."""
        write_record(self._block, row, self._block["records"][row], valid=valid)
        self._block["recorded"][row] = True

    def _pass_over(self, row: int) -> None:
        """Go on in the list after an episode that never began.

        The row may hold the record of another one, so this one is reported by a message.
        """
        names = ("episode_id", "seed", "task")
        self._unplayed.append({"row": row, **{name: int(self._block[name][row]) for name in names}})
        self._block["index"][row] += 1
        self._block["attempt"][row] = 0
