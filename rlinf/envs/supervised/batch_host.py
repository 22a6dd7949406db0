"""Batches of one process: simulators that step many rows together, one batch for each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.base import BatchStep, Observation, Simulator, SimulatorBatch
from rlinf.envs.results import TASK_IDS, FaultReason
from rlinf.envs.supervised.block import Status
from rlinf.envs.supervised.checks import EnvSideFault, ObservationRows, guarded, require_array
from rlinf.envs.supervised.host import EnvHost
from rlinf.errors import RunFailure

_FAILURES_IN_A_ROW = 3
_BESIDE = FaultReason.NOT_REPLAYABLE


class BatchHost(EnvHost):
    """Steps the rows of a stage together; what it writes into the block is that of a single env.

    A row whose observation or reward is not usable is closed and reset alone. When the simulator
    raises, the episodes of the whole batch are closed, and it is built anew.

    Args:
        make_batch: Builds the simulator of so many rows.
        batches: The first simulator of each stage.
        stages: Rows of the block, by stage.
    """

    def __init__(
        self,
        *,
        make_batch: Callable[[int], SimulatorBatch],
        batches: Sequence[SimulatorBatch],
        stages: Sequence[Sequence[int]],
        **shared: Any,
    ) -> None:
        self._batches = list(batches)
        super().__init__(make=_no_single_env, envs={}, **shared)
        self._make_batch = make_batch
        self._stages = [np.array(rows, np.int64) for rows in stages]
        self._begun = [False] * len(self._batches)

    def reset(self, rows: Sequence[int], sequence: int) -> None:
        """Start an episode in each row of a stage."""
        pending = self._pending(rows, sequence)
        if len(pending):
            self._progress[0] = pending[0]
            self._start_episodes(self._stage_of(pending[0]), pending)
            self._block["done_sequence"][pending] = sequence
            self._progress[0] = -1

    def step(self, rows: Sequence[int], sequence: int, chunk: int) -> None:
        """Execute one action chunk in each row of a stage."""
        pending = self._pending(rows, sequence)
        if not len(pending):
            return
        self._prepare(pending, chunk)
        stage = self._stage_of(pending[0])
        self._progress[0] = pending[0]
        try:
            # Of a batch that was lost with its process, those that rest are pending alone.
            if self._block["active"][pending].any():
                self._run_stage(stage, chunk)
        except EnvSideFault as fault:
            self._lose_batch(stage, fault)
        self._block["done_sequence"][pending] = sequence
        self._progress[0] = -1

    def restore(self, rows: Mapping[str, dict[str, Any]]) -> None:
        """Close the episodes that ran in simulators that are gone, and begin others."""
        block = self._block
        for stage, mine in enumerate(self._stages):
            lost = [row for row in mine.tolist() if block["status"][row] == Status.RUNNING]
            for row in lost:
                entry = rows.get(str(row), {})
                in_flight = entry.get("sequence")
                begun = block["begun"][row]
                if begun and in_flight is not None:
                    block["acted_episode"][row] = block["episode_id"][row]
                    block["acted_seed"][row] = block["seed"][row] + block["seed_shift"][row]
                    block["active"][row] = True
                broken = "broken" in entry
                reason = FaultReason(entry["broken"][0]) if broken else FaultReason.NOT_REPLAYABLE
                detail = entry["broken"][1] if broken else "its batch was lost with its process"
                fault = EnvSideFault(reason, detail)
                ended = in_flight is not None and block["final"][row] and block["steps"][row]
                recorded = in_flight is None and block["recorded"][row] and not block["steps"][row]
                if ended:  # in this chunk, and was to begin anew at its end
                    pass
                elif begun and not recorded:
                    self._invalidate(row, fault, known=broken)
                elif broken or recorded:
                    # Lost in a reset, or behind it: the chunk before it stays what it was.
                    self._episodes.note_fault(row, fault, known=broken)
                if in_flight is not None:
                    block["done_sequence"][row] = in_flight
            self._start_episodes(stage, np.array(lost, np.int64))

    def states(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """None: a batch cannot be continued row by row."""
        return {}

    def render(self, row: int) -> np.ndarray:
        """A picture of a row, uint8 [H, W, 3]."""
        stage = self._stage_of(row)
        return np.asarray(self._batches[stage].render(self._position(stage, row)))

    def _simulator(self, row: int) -> Simulator:
        return self._batches[0]

    def close(self) -> None:
        """End every simulator."""
        for batch in self._batches:
            batch.close()

    def _stage_of(self, row: int) -> int:
        return next(stage for stage, rows in enumerate(self._stages) if row in rows)

    def _position(self, stage: int, row: int) -> int:
        return int(np.flatnonzero(self._stages[stage] == row)[0])

    def _run_stage(self, stage: int, chunk: int) -> None:
        """Execute a chunk in a batch; rows whose episode ended wait for the end of the chunk."""
        block, rules = self._block, self.rules
        rows, batch = self._stages[stage], self._batches[stage]
        running, broken = block["active"][rows].copy(), []
        seen: Observation = {}
        width = chunk if batch.whole_chunks else 1
        for column in range(0, chunk, width):
            if not running.any():
                break
            self._progress[1] += 1
            left = rules.max_episode_steps - block["steps"][rows]
            lengths = np.where(running, np.minimum(left, width), 0)
            executed = np.arange(width) < lengths[:, None]
            actions = block["actions"][rows, column : column + width]
            actions = np.where(executed[:, :, None], actions, 0.0).astype(np.float32)
            if batch.whole_chunks:
                step = guarded(batch.chunk_step, actions, lengths)
            else:
                step = guarded(batch.step, actions[:, 0])
            self._check(step, (len(rows), width) if batch.whole_chunks else (len(rows),))
            rewards = np.asarray(step.rewards, np.float64).reshape(len(rows), width)
            sound = (np.isfinite(rewards) | ~executed).all(axis=1)
            rewards = np.where(executed, rewards, 0.0)
            terminated = np.asarray(step.terminated, bool) & (not rules.ignore_terminations)
            truncated = np.asarray(step.truncated, bool) | (lengths == left)
            ended = running & (terminated | truncated)
            wanted = ended.any() or column + width == chunk
            if wanted or not callable(step.observations):  # else they stay on the device
                seen = self._read(step.observations, self._observations, batch)
                sound &= self._finite(seen)
            broken += self._close_unsound(rows, running & ~sound)
            running &= sound
            live = rows[running]
            block["steps"][live] += lengths[running]
            block["episode_return"][live] += rewards[running].sum(axis=1)
            seen_by_training = np.where(executed, rules.training_reward(rewards), 0.0)[running]
            block["rewards"][live, column : column + width] = seen_by_training
            ended &= running
            success = np.asarray(step.success, bool)
            success = (success & ended if batch.judged_at_end else success)[running]
            block["success_once"][live] |= success
            block["success_now"][live] = success
            if ended.any():
                finals = seen
                if step.final_observations is not None:
                    finals = self._read(step.final_observations, self._finals, batch)
                self._end_rows(stage, ended, terminated, truncated, finals)
                running &= ~ended
        if running.any():
            self._observations.write_sound(seen, np.flatnonzero(running), rows[running])
        self._begin_next(stage, broken)

    def _close_unsound(self, rows: np.ndarray, unsound: np.ndarray) -> list[int]:
        """Close the episodes of the rows that hold what is no number; which they are."""
        for position in np.flatnonzero(unsound).tolist():
            detail = f"row {position} of the batch holds a NaN or an infinity"
            self._invalidate(int(rows[position]), EnvSideFault(FaultReason.NOT_FINITE, detail))
        return [int(row) for row in rows[unsound]]

    def _end_rows(
        self,
        stage: int,
        ended: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        finals: Observation,
    ) -> None:
        """Note what the ended rows showed last, and their records."""
        for position in np.flatnonzero(ended).tolist():
            row = int(self._stages[stage][position])
            self._finals.write(_row(finals, position), row)
            self._block["terminated"][row] = terminated[position]
            self._block["truncated"][row] = truncated[position]
            self._end_episode(row)

    def _begin_next(self, stage: int, broken: Sequence[int]) -> None:
        """Begin episodes in the rows that ended within a chunk, and in those that broke."""
        rows = self._stages[stage]
        waiting = [*rows[self._block["final"][rows]].tolist(), *broken]
        self._start_episodes(stage, np.array(waiting, np.int64))

    def _start_episodes(self, stage: int, rows: np.ndarray) -> None:
        """Reset rows into their next episodes.

        Raises:
            RunFailure: The simulator cannot be reset.
        """
        begun = np.array([row for row in rows.tolist() if self._episodes.enter_next(row)], np.int64)
        if not len(begun):
            return
        batch = self._batches[stage]
        if batch.begins_together(batch.options):
            detail = "its scene began anew with that of a row that broke"
            fault = EnvSideFault(FaultReason.NOT_REPLAYABLE, detail)
            begun = np.append(begun, self._lost_beside(stage, begun, fault))
        positions = np.array([self._position(stage, row) for row in begun], np.int64)
        for _ in range(_FAILURES_IN_A_ROW):
            self._progress[1] += 1
            try:
                seen = guarded(batch.reset, positions, self._block["seed"][begun].copy())
                seen = self._with_tasks(seen, batch)
                self._observations.check_batch(seen, batch.num_envs)
                self._block["seed_shift"][begun] = batch.seed_shifts()[positions]
                for position, row in zip(positions, begun):  # noqa: B905 - Python 3.8
                    self._observations.write(_row(seen, int(position)), int(row))
                    self._episodes.began(int(row))
                return
            except EnvSideFault as fault:
                last = fault
                batch = self._batches[stage] = self._rebuilt(batch)
                begun = np.append(begun, self._lost_beside(stage, begun, fault))
                positions = np.array([self._position(stage, row) for row in begun], np.int64)
        raise RunFailure(
            f"a batch of {len(self._stages[stage])} envs could not be reset {_FAILURES_IN_A_ROW} "
            f"times in a row; the last time: {last.reason.value}: {last.summary}"
        )

    def _lost_beside(self, stage: int, begun: np.ndarray, fault: EnvSideFault) -> np.ndarray:
        """Close the episodes that run beside rows that are begun, since their simulator, or where
        they were in it, is gone; the rows, to be begun as well."""
        rows = self._stages[stage]
        running = rows[self._block["status"][rows] == Status.RUNNING]
        lost = np.setdiff1d(running, begun)
        self._invalidate_together(lost, fault)
        return np.array([row for row in lost.tolist() if self._episodes.enter_next(row)], np.int64)

    def _lose_batch(self, stage: int, fault: EnvSideFault) -> None:
        """Close every episode of a batch whose simulator raised, and build it anew."""
        rows = self._stages[stage]
        # Those that ended in the chunk are at rest until its end.
        running = (self._block["status"][rows] == Status.RUNNING) & ~self._block["final"][rows]
        lost = rows[running]
        self._invalidate_together(lost, fault)
        self._batches[stage] = self._rebuilt(self._batches[stage])
        self._begin_next(stage, lost.tolist())

    def _rebuilt(self, batch: SimulatorBatch) -> SimulatorBatch:
        with contextlib.suppress(EnvSideFault):
            guarded(batch.close)
        self._progress[1] += 1
        return guarded(self._make_batch, batch.num_envs)

    def _invalidate_together(self, rows: np.ndarray, fault: EnvSideFault) -> None:
        """Close episodes that one fault took, which counts once."""
        detail = f"its batch was lost by {fault.reason.value} in another row: {fault.summary}"
        for place, row in enumerate(rows.tolist()):
            own = not place or fault.reason is FaultReason.NOT_REPLAYABLE
            self._invalidate(row, fault if own else EnvSideFault(_BESIDE, detail))

    def _invalidate(self, row: int, fault: EnvSideFault, *, known: bool = False) -> None:
        """Close the episode of a row as faulty; nothing of its chunk counts."""
        block = self._block
        block["rewards"][row] = 0.0
        block["valid"][row] = False
        for name in ("terminated", "truncated", "final", "recorded"):
            block[name][row] = False
        self._episodes.note_fault(row, fault, known=known)

    @staticmethod
    def _check(step: BatchStep, rewards: tuple[int, ...]) -> None:
        """Refuse what is not of N rows, or rewards that are not of this shape.

        What of it is not finite is a matter of its row.
        """
        require_array("`rewards`", step.rewards, rewards)
        for name in ("terminated", "truncated", "success"):
            require_array(f"`{name}`", getattr(step, name), rewards[:1])

    def _read(
        self,
        source: Observation | Callable[[], Observation],
        written: ObservationRows,
        batch: SimulatorBatch,
    ) -> Observation:
        """The observations of a step; refused where they are not of N rows as in the block."""
        found = guarded(source) if callable(source) else source
        seen = self._with_tasks(found, batch)
        written.check_batch(seen, batch.num_envs)
        return seen

    def _with_tasks(self, observations: Observation, batch: SimulatorBatch) -> Observation:
        if not self._tells_task:
            return observations
        return {**observations, TASK_IDS: np.asarray(batch.task_ids(), np.int64)}

    @staticmethod
    def _finite(observations: Observation) -> np.ndarray:
        """[N] bool, rows whose floats are all finite."""
        floats = [
            np.isfinite(value.reshape(len(value), -1)).all(axis=1)
            for value in observations.values()
            if value.dtype.kind == "f"
        ]
        return np.logical_and.reduce(floats) if floats else np.array(True)


def _row(observations: Observation, position: int) -> Observation:
    """One row of a batch of observations."""
    return {key: np.asarray(value[position]) for key, value in observations.items()}


def _no_single_env() -> Any:
    raise RuntimeError("a batch has no single envs")
