"""The supervised env processes of one vector env: they are replaced when they crash or hang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.block import (
    SharedBlock,
    block_fields,
    block_size,
    open_descriptor,
    size_descriptor,
)
from rlinf.envs.client import EnvProcess, ProcessLostError
from rlinf.envs.spec import EnvSpec
from rlinf.envs.wire import Message, Op, encode_tree
from rlinf.errors import ConfigError, RunFailure

MAX_RESTARTS_IN_A_ROW = 5

Fault = dict[str, Any]
"""``row`` (-1: none), ``reason``, ``detail``, ``episode``, as an env process reports it."""


class EnvPool:
    """Env processes that share one block.

    When a process is lost, it is built anew. The env that was at work starts a fresh episode; its
    neighbours in the process are brought back to where they were by replaying their actions, which
    lie in the block, and the commands in flight are sent again: rows that had completed them skip
    them.

    Args:
        settings: What every process must know.
        rows: Rows of the block, by process and stage.
        cores: Cores that each process may use.
        python: Interpreter, or None for this one.
        step_deadline: Seconds that one primitive step or reset may take.
        start_deadline: Seconds that building the envs may take.

    Raises:
        ConfigError: The env cannot be built as configured.
        MissingPackageError: The simulator is not installed.
        RunFailure: A process failed to start.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        rows: Sequence[Sequence[Sequence[int]]],
        cores: Sequence[Sequence[int]],
        *,
        python: str | None,
        step_deadline: float,
        start_deadline: float,
    ) -> None:
        self._settings = {**settings, "processes": len(rows)}
        self._rows = rows
        self._cores = [list(part) for part in cores]
        self._stage_of = {
            row: stage for process in rows for stage, part in enumerate(process) for row in part
        }
        self._python = python
        self._deadlines = {"step_deadline": step_deadline, "start_deadline": start_deadline}
        self._faults: list[Fault] = []
        self._processes: list[EnvProcess] = []
        self._memory = open_descriptor()
        try:
            self._start()
        except BaseException:
            # The others are still building; to ask them to close would wait for that.
            for process in self._processes:
                process.kill()
            self.close()
            raise

    def _start(self) -> None:
        self._processes += [self._new_process(index) for index in range(len(self._rows))]
        specs = [EnvSpec.from_json(process.started()["spec"]) for process in self._processes]
        if any(spec != specs[0] for spec in specs):
            raise ConfigError(f"the env looks different in different processes: {specs}")
        self.spec = specs[0]
        num_envs, max_chunk = self._settings["num_envs"], self._settings["max_chunk"]
        fields = block_fields(self.spec, num_envs, max_chunk, len(self._rows))
        size_descriptor(self._memory, block_size(fields))
        self.block = SharedBlock(self._memory, fields)
        self.block["progress"][:, 0] = -1
        for index, process in enumerate(self._processes):
            self._attach(index, process)

    def _new_process(self, index: int) -> EnvProcess:
        return EnvProcess(
            {
                **self._settings,
                "process": index,
                "rows": self._rows[index],
                "affinity": self._cores[index],
            },
            memory=self._memory,
            python=self._python,
            **self._deadlines,
        )

    def _attach(self, index: int, process: EnvProcess) -> None:
        process.progress = self.block["progress"][index]
        process.ask(Message(Op.ATTACH))

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        return [process.pid for process in self._processes]

    def take_faults(self) -> list[Fault]:
        """Return the faults since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def send(self, message: Message) -> None:
        """Send the command of a stage to every process."""
        for index, process in enumerate(self._processes):
            try:
                process.send(message)
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
                    self._faults += self._processes[index].collect()
                except ProcessLostError as lost:
                    self._replace(index, lost)

    def schedule(self, episodes: list[list[int]]) -> None:
        """Give every process another list of episodes to play."""
        changed = {**self._settings["schedule"], "episodes": episodes}
        self._settings = {**self._settings, "schedule": changed}
        message = Message(Op.SCHEDULE, payload=encode_tree(changed))
        for index in range(len(self._processes)):
            self._ask(index, message)

    def states(self) -> dict[int, np.ndarray]:
        """Return the encoded simulator state by row, for the rows that have one."""
        answers = [self._ask(index, Message(Op.STATE)) for index in range(len(self._processes))]
        return {int(row): state for answer in answers for row, state in answer.items()}

    def restore(self, orders: Mapping[int, dict[str, Any]]) -> None:
        """Bring the envs to where the block says they are (see :meth:`EnvHost.restore`)."""
        for index in range(len(self._processes)):
            mine = {str(row): orders.get(row, {}) for row in self._rows_of(index)}
            answer = self._ask(index, Message(Op.RESTORE, payload=encode_tree(mine)))
            self._faults += answer.get("faults", [])

    def render(self, row: int) -> np.ndarray:
        """Return a picture of the env of ``row``, uint8 [H, W, 3]."""
        index = next(i for i in range(len(self._rows)) if row in self._rows_of(i))
        frame: np.ndarray = self._ask(index, Message(Op.RENDER, chunk=row))["frame"]
        return frame

    def close(self) -> None:
        """End every process and give the memory back."""
        for process in self._processes:
            process.close()
        self._processes = []
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _rows_of(self, index: int) -> list[int]:
        return [row for part in self._rows[index] for row in part]

    def _ask(self, index: int, message: Message) -> dict[str, Any]:
        try:
            return self._processes[index].ask(message)
        except ProcessLostError as lost:
            self._replace(index, lost)
            return self._processes[index].ask(message)

    def _replace(self, index: int, lost: ProcessLostError) -> None:
        """Build a lost process anew and send it again what was in flight."""
        in_flight = list(self._processes[index].pending.values())
        for _ in range(MAX_RESTARTS_IN_A_ROW):
            self._processes[index].kill()
            broken = self._note_loss(index, lost)
            orders = {str(row): self._order(row, in_flight) for row in self._rows_of(index)}
            if broken >= 0:
                orders[str(broken)]["broken"] = [lost.reason.value, lost.detail]
            process = self._processes[index] = self._new_process(index)
            process.started()
            try:
                self._attach(index, process)
                answer = process.ask(Message(Op.RESTORE, payload=encode_tree(orders)))
                self._faults += answer.get("faults", [])
                for message in in_flight:
                    process.send(message)
                return
            except ProcessLostError as again:
                lost = again
        raise RunFailure(
            f"an env process was lost {MAX_RESTARTS_IN_A_ROW + 1} times in a row; the last time "
            f"({lost.reason.value}): {lost.detail}"
        )

    def _note_loss(self, index: int, lost: ProcessLostError) -> int:
        """Note the fault and return the row that was at work, -1 for none."""
        row = int(self.block["progress"][index, 0])
        episode = int(self.block["episode_id"][row]) if row >= 0 else -1
        self._faults.append(
            {"row": row, "reason": lost.reason.value, "detail": lost.detail, "episode": episode}
        )
        self.block["progress"][index, 0] = -1
        return row

    def _order(self, row: int, in_flight: Sequence[Message]) -> dict[str, Any]:
        """Return how a row of a lost process is restored: lost rows complete their command."""
        for message in in_flight:
            done = self.block["done_sequence"][row] == message.sequence
            if message.stage == self._stage_of[row] and not done:
                return {"sequence": message.sequence}
        return {}
