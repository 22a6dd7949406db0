"""The envs of one process: chunks of steps, resets, faults, episode records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.base import Simulator, SimulatorEnv
from rlinf.envs.results import TASK_IDS, FaultReason
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.block import Status
from rlinf.envs.supervised.checks import (
    EnvSideFault,
    ObservationRows,
    answered,
    checked_flag,
    checked_reward,
    guarded,
)
from rlinf.envs.supervised.episodes import Episodes
from rlinf.envs.supervised.failing_tasks import RESETS
from rlinf.envs.supervised.kept_states import StateKeeper, encoded_state
from rlinf.envs.supervised.schedule import EpisodeRules
from rlinf.errors import RunFailure
from rlinf.processes.shared_block import SharedBlock
from rlinf.processes.wire import decode_tree

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")
_BLIND = _STEP[1:]
_COUNTERS = ("steps", "episode_return", "success_once", "success_now", "fail_once", "done_sequence")
_FLAGS = ("terminated", "truncated", "final", "recorded")


class EnvHost:
    """Steps the envs of some rows of a shared block.

    Args:
        make: Builds one env.
        envs: The first env of each row.
        numbers: Global number of the env of each row.
        rows: The rows of this process.
        progress: This process's cells of the block: present row, count of steps.
    """

    def __init__(
        self,
        *,
        make: Callable[[], SimulatorEnv],
        envs: dict[int, SimulatorEnv],
        spec: EnvSpec,
        block: SharedBlock,
        rules: EpisodeRules,
        numbers: Sequence[int],
        progress: np.ndarray,
        rows: Sequence[int],
    ) -> None:
        self._make = make
        self._envs = envs
        self._block = block
        self.rules = rules
        self._numbers = numbers
        self._progress = progress
        self._keeper = StateKeeper(block)
        # Single numbers are read and written in half the time of an array's.
        self._ticks: Any = progress.data
        self._rewards: Any = block["rewards"].data
        self._counters: dict[str, Any] = {name: block[name].data for name in _COUNTERS}
        never_black = self._simulator(rows[0]).never_black
        self._observations = ObservationRows(block.group("observation"), never_black)
        self._finals = ObservationRows(block.group("final"), never_black)
        self._one_choice = spec.choices is not None and len(spec.choices) == 1
        self._tells_task = TASK_IDS in spec.observation_shapes
        self._episodes = Episodes(
            block=block,
            rules=rules,
            numbers=numbers,
            rows=rows,
            descriptions=spec.task_descriptions,
            task_of=self._simulator(rows[0]).task_of,
        )

    def _simulator(self, row: int) -> Simulator:
        return self._envs[row]

    def take_report(self) -> dict[str, Any]:
        """What happened since the last call, see :meth:`Episodes.take_report`."""
        return self._episodes.take_report()

    def take_states(self) -> dict[str, np.ndarray]:
        """States by row that were taken since the last call, see :class:`StateKeeper`."""
        return self._keeper.take()

    def schedule(self, rules: EpisodeRules) -> None:
        """Play by other rules from the next reset on."""
        self.rules = self._episodes.rules = rules

    def reset(self, rows: Sequence[int], sequence: int) -> None:
        """Start an episode in each row; the counters were set by the vector env."""
        for row in self._at_work(self._pending(rows, sequence), sequence):
            self._begin_episode(row)

    def step(self, rows: Sequence[int], sequence: int, chunk: int) -> None:
        """Execute one action chunk in each row."""
        block, pending = self._block.arrays, self._pending(rows, sequence)
        part = self._prepare(pending, chunk)
        # A copy: a simulator may keep the array it was given.
        actions, active = block["actions"][part, :chunk].copy(), block["active"][part].tolist()
        for index, row in enumerate(self._at_work(pending, sequence)):
            if active[index]:
                begin = time.perf_counter()
                try:
                    self._run_chunk(row, actions[index])
                except EnvSideFault as fault:
                    self._replace_episode(row, fault)
                self._keeper.stepped(row, self._envs[row], time.perf_counter() - begin)

    def _prepare(self, pending: np.ndarray, chunk: int) -> slice | np.ndarray:
        """Write into the rows that a chunk begins, for the episodes that are running; returns which
        they are."""
        block, part = self._block.arrays, _part(pending)
        for name in _FLAGS:
            block[name][part] = False
        block["rewards"][part, :chunk] = 0.0
        block["valid"][part] = True
        block["active"][part] = block["status"][part] == Status.RUNNING
        block["acted_episode"][part] = block["episode_id"][part]
        block["acted_seed"][part] = block["seed"][part] + block["seed_shift"][part]
        return part

    def restore(self, rows: Mapping[str, dict[str, Any]]) -> None:
        """Bring envs that were just built to where the block says they are.

        Args:
            rows: By row number: ``broken`` (reason, detail) for an env whose episode is lost,
                ``state`` (bytes) when the simulator gave one, and the ``steps`` of the episode
                that led to it, ``sequence`` of a command in flight that a lost row has thereby
                completed.
        """
        self._episodes.tasks.review()
        for name, entry in rows.items():
            row = int(name)
            self._progress[0] = row
            try:
                if "broken" in entry:
                    reason, detail = entry["broken"]
                    raise EnvSideFault(FaultReason(reason), detail)
                if self._block["status"][row] == Status.RUNNING:
                    self._rebuild(row, entry.get("state"), entry.get("steps", 0))
            except EnvSideFault as fault:
                self._give_up(row, fault, entry)
            self._progress[0] = -1

    def states(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """The encoded simulator state by row, for the rows that have one."""
        running = [row for row in rows if self._block["status"][row] == Status.RUNNING]
        states = {str(row): encoded_state(self._envs[row]) for row in running}
        return {row: state for row, state in states.items() if state is not None}

    def render(self, row: int) -> np.ndarray:
        """A picture of the env of ``row``, uint8 [H, W, 3]."""
        return np.asarray(self._envs[row].render())

    def close(self) -> None:
        """Close every env; one that cannot does not keep the others open."""
        for env in self._envs.values():
            with contextlib.suppress(EnvSideFault):
                guarded(env.close)

    def _pending(self, rows: Sequence[int], sequence: int) -> np.ndarray:
        """The rows that have not completed this command, which is sent again after a crash."""
        candidates = np.array(rows, np.int64)
        unfinished = self._block["done_sequence"][candidates] != sequence
        return np.asarray(candidates[unfinished])

    def _at_work(self, rows: np.ndarray, sequence: int) -> Iterator[int]:
        """Yield the rows one by one, saying which one is at work and then that it is done."""
        ticks, done = self._ticks, self._counters["done_sequence"]
        for row in rows.tolist():
            ticks[0] = row
            yield row
            done[row] = sequence
        ticks[0] = -1

    def _run_chunk(self, row: int, actions: np.ndarray) -> None:
        """Execute ``actions`` [C, A] in ``row``, up to the end of the episode."""
        rules, env, counters = self.rules, self._envs[row], self._counters
        log, rewards = self._block.arrays["log"], self._rewards
        steps, total = counters["steps"][row], counters["episode_return"][row]
        success_once, fail_once = counters["success_once"][row], counters["fail_once"][row]
        success = terminated = truncated = False
        observation: Any = None
        last = min(len(actions), rules.max_episode_steps - steps) - 1
        blind = last - env.observation_steps  # up to here nothing is looked at
        for column, action in enumerate(actions):
            observation, reward, ended, cut, info = self._step_env(
                env, action, blind=column <= blind
            )
            value = checked_reward(reward)
            log[row, steps] = action
            steps += 1
            total += value
            rewards[row, column] = rules.training_reward(value)
            fail_once |= checked_flag("fail", info)
            terminated = bool(ended) and not rules.ignore_terminations
            truncated = bool(cut) or steps >= rules.max_episode_steps
            success = checked_flag("success", info)
            success &= terminated or truncated or not env.judged_at_end
            success_once |= success
            if terminated or truncated:
                break
            if observation is not None and column < last:
                self._observations.check(self._with_task(observation, row))
        if observation is None:
            observation = guarded(env.observe)
        observation = self._with_task(observation, row)
        ended_now = terminated or truncated
        (self._finals if ended_now else self._observations).write(observation, row)
        counters["steps"][row] = steps
        counters["episode_return"][row] = total
        counters["success_once"][row] = success_once
        counters["success_now"][row] = success
        counters["fail_once"][row] = fail_once
        if ended_now:
            self._block["terminated"][row] = terminated
            self._block["truncated"][row] = truncated
            if self._end_episode(row):
                self._begin_episode(row)

    def _with_task(self, observation: Any, row: int) -> Any:
        """The observation with the task that the env is in, where there are several."""
        if not self._tells_task or not isinstance(observation, dict):
            return observation
        task = self._block["task"][row] = self._envs[row].task_id
        return {**observation, TASK_IDS: np.array(task, np.int64)}

    def _step_env(self, env: SimulatorEnv, action: np.ndarray, *, blind: bool) -> Any:
        self._ticks[1] += 1
        given: Any = int(action[0]) if self._one_choice else action
        if blind and env.skips_observations:
            found = (None, *answered(_BLIND, env.step_blind, given))
        else:
            found = answered(_STEP, env.step, given)
        if type(found[-1]) is not dict and not isinstance(found[-1], Mapping):
            info = repr(found[-1])[:100]
            raise EnvSideFault(FaultReason.MALFORMED, f"step returns {info} as info, no mapping")
        return found

    def _end_episode(self, row: int) -> bool:
        """Record the episode of ``row``; whether another one follows in it."""
        self._tell_remark(row)
        self._episodes.record(row, valid=True)
        follows = self.rules.auto_reset or self.rules.episodes is not None
        if follows:
            self._block["final"][row] = True
            self._block["index"][row] += 1
            self._block["attempt"][row] = 0
        else:
            self._observations.copy_row(self._finals, row)
            self._block["status"][row] = Status.ENDED
        return follows

    def _tell_remark(self, row: int) -> None:
        """Pass on what the env of ``row`` remarks: also of an episode that none follows."""
        simulator = self._simulator(row)
        if words := simulator.remark:
            simulator.remark = ""
            self._episodes.remark(words)

    def _begin_episode(self, row: int) -> None:
        """Reset the env of ``row`` into its next episode.

        Raises:
            RunFailure: Several episodes in a row could not be started, or those of a task never.
        """
        failures = 0
        while failures < RESETS:
            if not self._episodes.enter_next(row):
                return
            try:
                self._progress[1] += 1
                seed = int(self._block["seed"][row])
                observation, _ = answered(_RESET, self._envs[row].reset, seed=seed)
                self._tell_remark(row)
                self._observations.write(self._with_task(observation, row), row)
                self._episodes.began(row)
                return
            except EnvSideFault as fault:
                last = fault
                failures += not self._episodes.fails_to_begin(row, fault)
                self._close_episode(row, fault)
        raise RunFailure(
            f"env {self._numbers[row]} could not be reset {RESETS} times in a row; "
            f"the last time, with seed {seed}: {last.reason.value}: {last.summary}"
        )

    def _replace_episode(self, row: int, fault: EnvSideFault, *, known: bool = False) -> None:
        """Close the episode as invalid, build the env anew and start another one."""
        block = self._block
        block["rewards"][row] = 0.0
        block["valid"][row] = False
        for name in _FLAGS:
            block[name][row] = False
        self._close_episode(row, fault, known=known)
        self._begin_episode(row)

    def _close_episode(self, row: int, fault: EnvSideFault, *, known: bool = False) -> None:
        self._episodes.note_fault(row, fault, known=known)
        with contextlib.suppress(EnvSideFault):
            guarded(self._envs[row].discard)
        self._progress[1] += 1
        self._envs[row] = guarded(self._make)

    def _give_up(self, row: int, fault: EnvSideFault, entry: dict[str, Any]) -> None:
        """Go on with another episode in a row that cannot be restored."""
        block, lost = self._block, "broken" in entry
        unbegun = lost and not block["begun"][row]
        # Without a command in flight what is recorded is of the chunk that just ended.
        behind = block["recorded"][row] and not block["steps"][row] and "sequence" not in entry
        if unbegun or behind:
            # Lost in a reset, or behind it: the chunk before it stays what it was.
            if unbegun:
                self._episodes.fails_to_begin(row, fault)
            self._close_episode(row, fault, known=lost)
            self._begin_episode(row)
        else:
            block["acted_episode"][row] = block["episode_id"][row]
            block["acted_seed"][row] = block["seed"][row]
            block["active"][row] = True
            self._replace_episode(row, fault, known=lost)
        if entry.get("sequence") is not None:
            block["done_sequence"][row] = entry["sequence"]

    def _rebuild(self, row: int, state: np.ndarray | None, told: int) -> None:
        """Bring a new env to where the old one was: by the state after ``told`` steps, if there is
        one, and by repeating the actions behind it."""
        env, block = self._envs[row], self._block
        steps = int(block["steps"][row])
        repeated = block["log"][row, told:steps].copy()
        if len(repeated) and not env.replayable:
            raise EnvSideFault(
                FaultReason.NOT_REPLAYABLE,
                "the env had to be built anew, and this simulator's actions must not be repeated",
            )
        self._progress[1] += 1
        observation, _ = answered(_RESET, env.reset, seed=int(block["seed"][row]))
        if state is not None:
            guarded(env.set_state, decode_tree(state.tobytes()))
            if not len(repeated):
                return
        for action in repeated:
            observation = self._step_env(env, action, blind=False)[0]
        if self._observations.shows(self._with_task(observation, row), row):
            return
        if not env.replayable:
            detail = "the env had to be built anew, and its seed leads to another start by now"
            raise EnvSideFault(FaultReason.NOT_REPLAYABLE, detail)
        raise EnvSideFault(
            FaultReason.MALFORMED,
            "the env could not be rebuilt: replaying its actions since the last reset led to "
            "another observation, so the simulator is not deterministic",
        )


def _part(rows: np.ndarray) -> slice | np.ndarray:
    """Ascending rows as a slice where none is left out, which numpy reads and writes faster."""
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)
