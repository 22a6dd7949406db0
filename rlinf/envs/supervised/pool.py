"""The supervised env processes of one vector env: they are replaced when they crash or hang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.supervised.block import block_fields
from rlinf.envs.supervised.failing_tasks import never_began
from rlinf.envs.supervised.faults import EnvReport
from rlinf.envs.supervised.handle import Command, EnvProcess, ProcessLimits
from rlinf.envs.supervised.kept_states import KeptStates
from rlinf.errors import ConfigError, RunFailure
from rlinf.processes.child import ProcessLostError, require_open_files
from rlinf.processes.shared_block import (
    MemoryShortageError,
    SharedBlock,
    block_size,
    open_memory,
    reserve,
)

MAX_RESTARTS_IN_A_ROW = 5
MAX_TOO_LARGE_IN_A_ROW = 8


class EnvPool:
    """Env processes that share one block.

    When a process is lost, it is built anew. The env that was at work starts a fresh episode; its
    neighbours in the process are brought back to where they were, by the last state that they gave
    and by repeating their actions since then, which lie in the block, and the commands in flight
    are sent again: rows that had completed them skip them.

    Args:
        settings: What every process must know.
        rows: Rows of the block, by process and stage.
        cores: Cores that each process may use.
        limits: Under which every process runs.

    Raises as :meth:`EnvProcess.started`, and a RunFailure where a process ends at its first start.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        rows: Sequence[Sequence[Sequence[int]]],
        cores: Sequence[Sequence[int]],
        limits: ProcessLimits,
    ) -> None:
        self._settings = {**settings, "processes": len(rows)}
        self._rows = rows
        self._cores = [list(part) for part in cores]
        self._stage_of = {
            row: stage for process in rows for stage, part in enumerate(process) for row in part
        }
        self._limits = limits
        self._report, self._kept = EnvReport(), KeptStates()
        self._too_large = [0] * len(rows)  # replacements in a row that held too much at once
        self._processes: list[EnvProcess] = []
        self._memory = open_memory("rlinf-envs")
        try:
            self._start()
        except BaseException:
            # The others are still building; to ask them to close would wait for that.
            for each in self._processes:
                each.process.kill()
            self.close()
            raise

    def _start(self) -> None:
        require_open_files(len(self._rows))
        self._processes += [self._new_process(index) for index in range(len(self._rows))]
        try:
            specs = [process.started() for process in self._processes]
        except ProcessLostError as lost:
            raise RunFailure(f"an env process was lost at its start: {lost.detail}") from lost
        if any(spec != specs[0] for spec in specs):
            raise ConfigError(f"the env looks different in different processes: {specs}")
        self.spec = specs[0]
        num_envs, max_chunk = self._settings["num_envs"], self._settings["max_chunk"]
        fields = block_fields(self.spec, num_envs, max_chunk, len(self._rows))
        try:
            reserve(self._memory, block_size(fields))
        except MemoryShortageError as error:
            raise ConfigError(
                f"the envs need {error.wanted / 2**20:.0f} MiB of shared memory and "
                f"{error.available / 2**20:.0f} MiB are available; use fewer envs, smaller images, "
                "a smaller max_episode_steps (the actions of an episode are kept), or allow more "
                "(docker run --shm-size=...)"
            ) from error
        for process in self._processes:
            if self._limits.memory is not None and process.memory() > self._limits.memory:
                raise self._refusal(process)
        self.block = SharedBlock(self._memory, fields)
        self.block["progress"][:, 0] = -1
        for index, process in enumerate(self._processes):
            self._attach(index, process)

    def _new_process(self, index: int) -> EnvProcess:
        own = {"process": index, "rows": self._rows[index], "affinity": self._cores[index]}
        return EnvProcess({**self._settings, **own}, self._memory, self._limits)

    def _attach(self, index: int, process: EnvProcess) -> None:
        process.progress = self.block["progress"][index]
        process.ask("attach")

    @property
    def repeats(self) -> dict[str, bool]:
        """See :attr:`SupervisedVectorEnv.repeats`."""
        return self._processes[0].repeats

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [each.process.pid for each in self._processes]

    def take_report(self) -> EnvReport:
        """What the processes reported since the last call."""
        report = self._report
        if report:
            self._report = EnvReport()
        return report

    def send(self, command: Command) -> None:
        """Send the command of a stage to every process."""
        for index, process in enumerate(self._processes):
            try:
                process.send(command)
            except ProcessLostError as lost:
                self._replace(index, lost)

    def wait(self, stage: int) -> None:
        """Wait until every process has completed the command in flight for ``stage``.

        Raises:
            RunFailure: A process cannot go on, or cannot be replaced.
        """
        for index in range(len(self._processes)):
            while stage in self._processes[index].pending:
                try:
                    answer = self._processes[index].collect()
                    self._report.add(answer)
                    self._kept.keep(self.block, answer.get("states", {}))
                except ProcessLostError as lost:
                    self._replace(index, lost)
            self._recycle(index)

    def schedule(self, episodes: list[list[int]]) -> None:
        """Give every process another list of episodes to play."""
        rules = {**self._settings["rules"], "episodes": episodes}
        self._settings = {**self._settings, "rules": rules}
        self._ask("schedule", [{"rules": rules}] * len(self._processes))

    def states(self) -> dict[int, np.ndarray]:
        """The encoded simulator state by row, for the rows that have one."""
        answers = self._ask("state", [{}] * len(self._processes))
        return {int(row): state for answer in answers for row, state in answer["states"].items()}

    def restore(self, states: Mapping[int, np.ndarray]) -> None:
        """Bring the envs to where the block says they are, where some had these encoded states
        (see :meth:`EnvHost.restore`)."""
        self._kept.clear()
        self._kept.keep(self.block, states)
        rows = [
            {"rows": {str(row): self._kept.order(self.block, row) for row in self._rows_of(index)}}
            for index in range(len(self._processes))
        ]
        for answer in self._ask("restore", rows):
            self._report.add(answer)

    def render(self, row: int) -> np.ndarray:
        """A picture of the env of ``row``, uint8 [H, W, 3]."""
        index = next(i for i in range(len(self._rows)) if row in self._rows_of(i))
        frame: np.ndarray = self._ask_one(index, "render", row=row)["frame"]
        return frame

    def close(self) -> None:
        """End every process and give the memory back."""
        for process in self._processes:  # all at the same time
            process.begin_close()
        for process in self._processes:
            process.close()
        self._processes = []
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _rows_of(self, index: int) -> list[int]:
        return [row for part in self._rows[index] for row in part]

    def _ask(self, operation: str, contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answers of all processes to a command outside of the stages, on which they work at the
        same time."""
        lost: dict[int, ProcessLostError] = {}
        for index, content in enumerate(contents):
            try:
                self._processes[index].order(operation, **content)
            except ProcessLostError as error:
                lost[index] = error
        answers = []
        for index, content in enumerate(contents):
            try:
                if index in lost:
                    raise lost[index]
                answers.append(self._processes[index].answer())
            except ProcessLostError as error:
                self._replace(index, error)
                answers.append(self._ask_one(index, operation, **content))
        return answers

    def _ask_one(self, index: int, operation: str, **content: Any) -> dict[str, Any]:
        try:
            return self._processes[index].ask(operation, **content)
        except ProcessLostError as lost:
            self._replace(index, lost)
            return self._processes[index].ask(operation, **content)

    def _replace(self, index: int, lost: ProcessLostError) -> None:
        """Build a lost process anew and send it again what was in flight."""
        in_flight = list(self._processes[index].pending.values())
        broken: dict[int, list[str]] = {}  # rows at work when a process was lost, until one knows
        for _ in range(MAX_RESTARTS_IN_A_ROW):
            self._processes[index].process.kill()
            if (row := self._note_loss(index, lost)) >= 0:
                broken[row] = [lost.reason, lost.detail]
            process = self._processes[index] = self._new_process(index)
            try:
                process.started()
                self._attach(index, process)
                orders = {str(row): self._order(row, in_flight) for row in self._rows_of(index)}
                for row, why in broken.items():
                    orders[str(row)]["broken"] = why
                broken = {}
                self._report.add(process.ask("restore", rows=orders))
                for command in in_flight:
                    process.send(command)
                return
            except ProcessLostError as again:
                lost = again
        raise RunFailure(
            f"an env process was lost {MAX_RESTARTS_IN_A_ROW + 1} times in a row; the last time "
            f"({lost.reason}): {lost.detail}"
        )

    def _recycle(self, index: int) -> None:
        """Build a process anew that holds too much memory and has nothing to do."""
        process, limit = self._processes[index], self._limits.memory
        if limit is None or process.pending:
            return
        if (held := process.memory()) > limit:
            detail = f"{held >> 20} MB are held, memory_limit_mb allows {limit >> 20}"
            lost = ProcessLostError("memory", detail)
            try:  # it still can say where its envs are
                self._kept.keep(self.block, process.ask("state")["states"])
            except ProcessLostError as other:
                lost = other
            self._replace(index, lost)
            too_large = self._processes[index].memory() > limit
            self._too_large[index] = self._too_large[index] + 1 if too_large else 0
            if self._too_large[index] == MAX_TOO_LARGE_IN_A_ROW:
                raise RunFailure(f"env.train.{self._refusal(self._processes[index])}")

    def _refusal(self, process: EnvProcess) -> ConfigError:
        """Of a limit below what a process holds whose envs were just built, or brought back."""
        limit, held = (self._limits.memory or 0) >> 20, process.memory() >> 20
        return ConfigError(
            f"{limit} MB are fewer than the {held} MB that a process holds whose envs were just "
            f"built, so it would be replaced again and again; nearest: {held * 5 // 4}",
            key="memory_limit_mb",
        )

    def _note_loss(self, index: int, lost: ProcessLostError) -> int:
        """Note the fault and return the row that was at work, -1 for none."""
        row = int(self.block["progress"][index, 0])
        episode = int(self.block["episode_id"][row]) if row >= 0 else -1
        unbegun = row >= 0 and never_began(self.block, self._rows_of(index), row)
        self._report.faults.append(
            {
                "row": row,
                "reason": lost.reason,
                "detail": lost.detail,
                "episode": episode,
                "never_began": unbegun,
            }
        )
        self.block["progress"][index, 0] = -1
        return row

    def _order(self, row: int, in_flight: Sequence[Command]) -> dict[str, Any]:
        """How a row of a lost process is restored: lost rows complete their command."""
        order = self._kept.order(self.block, row)
        for command in in_flight:
            done = self.block["done_sequence"][row] == command.sequence
            if command.stage == self._stage_of[row] and not done:
                return {**order, "sequence": command.sequence}
        return order
