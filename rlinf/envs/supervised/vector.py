"""Many envs in supervised processes, stepped by action chunks, several stages in flight."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.envs.base import REGISTRY, SimulatorBatch
from rlinf.envs.config import EnvConfig
from rlinf.envs.results import (
    RECORD_DTYPE,
    EnvFault,
    EpisodeRecord,
    FaultReason,
    Observations,
    VectorStep,
    read_record,
    unplayed_record,
)
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.block import Status, read_state, write_record, write_state
from rlinf.envs.supervised.faults import FaultWatch
from rlinf.envs.supervised.handle import Command, ProcessLimits
from rlinf.envs.supervised.pool import EnvPool
from rlinf.envs.supervised.schedule import EpisodeRules
from rlinf.envs.vector import VectorEnv
from rlinf.errors import ConfigError, in_section

log = logging.getLogger(__name__)

_RULES_OF_CONFIG = (
    "max_episode_steps",
    "auto_reset",
    "ignore_terminations",
    "reward_scale",
    "step_penalty",
    "group_size",
    "use_fixed_reset_states",
    "leave_out_failing_tasks",
)


class SupervisedVectorEnv(VectorEnv):
    """``num_envs`` envs in processes of their own.

    Every process hosts envs of every stage, so several stages can be in flight at once.

    Args:
        config: What to build.
        num_envs: N, the envs of this vector env.
        first_env: Number of its first env, among those of all workers.
        numbers: Global numbers of the envs, ascending, on which alone seeds depend; by default they
            count from ``first_env``.
        seed: Seed of the run.
        stages: Pipeline stages.
        total_envs: Envs over all workers; by default N.
        affinity: Cores that the processes may use; by default those of this process.
        purpose: ``train`` or ``eval``: the two never share a reset seed.
        episode_seeds: (episode id, seed) list that is walked exactly once over all envs, whatever
            their number; an env without further entries, or before an empty one, rests (see
            :attr:`VectorStep.active`).
            Envs then advance by themselves, also without ``auto_reset``.
        max_chunk: The largest C that will be sent.
        section: Key of ``config`` in the recipe, for what an adapter refuses while it plays.

    Raises:
        ConfigError: The env cannot be built as configured.
        MissingPackageError: The simulator is not installed.
        RunFailure: An env process failed to start, with the end of its output.
    """

    def __init__(
        self,
        config: EnvConfig,
        *,
        num_envs: int,
        first_env: int = 0,
        numbers: Sequence[int] | None = None,
        seed: int,
        stages: int = 1,
        total_envs: int | None = None,
        affinity: Sequence[int] | None = None,
        purpose: str = "train",
        episode_seeds: Sequence[tuple[int, ...]] | None = None,
        max_chunk: int = 64,
        section: str = "",
    ) -> None:
        config.check()
        if config.one_at_a_time and num_envs > 1:
            why = f"lets one env be open at once, not {num_envs}; nearest: one env, or false"
            raise ConfigError(why, key="one_at_a_time")
        _check_division(num_envs, stages, config.group_size)
        self.config = config
        self.num_envs = num_envs
        self.first_env = first_env
        self.numbers = list(numbers or range(first_env, first_env + num_envs))
        self.stages = stages
        self._max_chunk = max_chunk
        self._section = section
        self._sequence = 0
        self._in_flight: dict[int, int] = {}
        self._carried_invalid = np.zeros(num_envs, bool)
        self._faults: list[EnvFault] = []
        self._unplayed: list[EpisodeRecord] = []
        self._told: set[str] = set()  # of what processes say, each with the same words
        self._watch = FaultWatch(config.max_fault_rate, config.fault_window)
        rules = EpisodeRules(
            run_seed=seed,
            purpose=purpose,
            total_envs=total_envs or num_envs,
            episodes=None if episode_seeds is None else _plain(episode_seeds),
            **{name: getattr(config, name) for name in _RULES_OF_CONFIG},
        )
        self._pool = self._started(rules, list(affinity or _usable_cores()))
        self._block = self._pool.block
        self._block["epoch"][:] = -1
        self._observations = self._block.group("observation")
        self._finals = self._block.group("final")

    def _started(self, rules: EpisodeRules, cores: list[int]) -> EnvPool:
        """The processes, among which the envs of each stage are divided."""
        config, num_envs = self.config, self.num_envs
        # A batch uses the cores by itself, and is the faster the larger it is.
        adapter = REGISTRY.load(config.type)
        together = issubclass(adapter, SimulatorBatch)
        processes = config.processes or (1 if together else len(cores))
        processes = min(processes, num_envs // self.stages)
        slices = np.arange(num_envs).reshape(self.stages, -1)
        parts = [np.array_split(rows, processes) for rows in slices]  # each stage over all of them
        # Workers begin at different cores.
        first = self.first_env // num_envs * processes
        turns = [cores[(first + number) % len(cores)] for number in range(processes)]
        pinned = config.pin_processes and processes > 1
        return EnvPool(
            {
                "type": config.type,
                "remedy": config.remedy,
                "options": dataclasses.asdict(config.adapter_options),
                "observation_steps": config.observation_steps,
                "rules": dataclasses.asdict(rules),
                "numbers": self.numbers,
                "num_envs": num_envs,
                "max_chunk": self._max_chunk,
            },
            [[part[process].tolist() for part in parts] for process in range(processes)],
            [[core] for core in turns] if pinned else [cores] * processes,
            ProcessLimits(
                python=config.interpreter,
                environment=config.environment,
                imported=None if together else adapter.imported,
                memory=None if config.memory_limit_mb is None else config.memory_limit_mb << 20,
                step_deadline=config.step_deadline,
                start_deadline=config.start_deadline,
            ),
        )

    @property
    def env_spec(self) -> EnvSpec:
        """See :attr:`VectorEnv.env_spec`."""
        return self._pool.spec

    @property
    def repeats(self) -> dict[str, bool]:
        """What the simulator says of itself, with these options: whether it is ``deterministic``,
        and ``replayable``."""
        return self._pool.repeats

    @property
    def process_ids(self) -> list[int]:
        """The ids of the env processes."""
        return self._pool.pids

    @property
    def task_resets(self) -> np.ndarray:
        """See :attr:`VectorEnv.task_resets`."""
        return np.asarray(self._block["task_resets"].sum(axis=0))

    def exhausted(self, stage: int = 0) -> bool:
        """See :meth:`VectorEnv.exhausted`."""
        return bool((self._block["status"][self._slice(stage)] == Status.EXHAUSTED).all())

    def unfinished(self) -> list[EpisodeRecord]:
        """See :meth:`VectorEnv.unfinished`."""
        self._refuse_in_flight(*range(self.stages))
        block = self._block
        rows = np.flatnonzero((block["status"] == Status.RUNNING) & (block["steps"] > 0))
        records = np.zeros(len(rows), RECORD_DTYPE)
        for record, row in zip(records, rows.tolist(), strict=True):
            write_record(block, row, record, valid=True)
        return [read_record(self.numbers[r], each) for r, each in zip(rows, records, strict=True)]

    def assign_episodes(self, episode_seeds: Sequence[tuple[int, ...]]) -> None:
        """Replace the list of episodes; :meth:`reset` starts to walk it.

        The processes stay, so that evaluating again costs no start.
        """
        self._refuse_in_flight(*range(self.stages))
        self._pool.schedule(_plain(episode_seeds))

    def reset(self, stage: int = 0) -> Observations:
        """See :meth:`VectorEnv.reset`."""
        self._refuse_in_flight(stage)
        part = self._slice(stage)
        self._block["epoch"][part] += 1
        for name in ("index", "attempt", "steps"):
            self._block[name][part] = 0
        self._block["status"][part] = Status.IDLE
        self._command(stage, "reset", 1)
        with in_section(self._section):
            self._pool.wait(stage)
        self._note_faults()
        del self._in_flight[stage]
        self._carried_invalid[part] = False
        self._watch.check()
        return self.observations(stage)

    def observations(self, stage: int = 0) -> Observations:
        """See :meth:`VectorEnv.observations`."""
        part = self._slice(stage)
        return {key: array[part].copy() for key, array in self._observations.items()}

    def send(self, actions: np.ndarray, stage: int = 0) -> None:
        """See :meth:`VectorEnv.send`."""
        self._refuse_in_flight(stage)
        part = self._slice(stage)
        size, width = part.stop - part.start, self.env_spec.action_dim
        given = np.asarray(actions, np.float32)
        if given.ndim != 3 or given.shape[0] != size or given.shape[2] != width:
            raise ValueError(
                f"actions of stage {stage} must be [{size}, C, {width}], are {given.shape}"
            )
        chunk = given.shape[1]
        if not 1 <= chunk <= self._max_chunk:
            raise ValueError(f"a chunk of {chunk} actions; from 1 to max_chunk={self._max_chunk}")
        self._block["actions"][part, :chunk] = given
        self._command(stage, "step", chunk)

    def receive(self, stage: int = 0) -> VectorStep:
        """See :meth:`VectorEnv.receive`."""
        if stage not in self._in_flight:
            raise ValueError(f"nothing is in flight in stage {stage}: call send first")
        with in_section(self._section):
            self._pool.wait(stage)
        self._note_faults()
        result = self._collect(stage, self._in_flight.pop(stage))
        self._watch.note_sound(sum(episode.valid for episode in result.episodes))
        self._watch.check()
        return result

    def render(self, env: int = 0) -> np.ndarray:
        """See :meth:`VectorEnv.render`."""
        self._refuse_in_flight(*range(self.stages))
        return self._pool.render(env)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        self._refuse_in_flight(*range(self.stages))
        state = read_state(self._block, self._pool.states())
        self._note_faults()
        return {
            **state,
            "first_env": self.first_env,
            "carried_invalid": self._carried_invalid.copy(),
            "fault_watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`VectorEnv.load_state_dict`."""
        self._refuse_in_flight(*range(self.stages))
        states = write_state(self._block, state, self.first_env)
        self._carried_invalid[:] = state["carried_invalid"]
        self._watch.load_state_dict(state["fault_watch"])
        self._block["done_sequence"][:] = 0
        self._pool.restore(states)
        self._note_faults()

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self._pool.close()

    def _slice(self, stage: int) -> slice:
        if not 0 <= stage < self.stages:
            raise ValueError(f"stage {stage} of {self.stages}")
        size = self.num_envs // self.stages
        return slice(stage * size, (stage + 1) * size)

    def _refuse_in_flight(self, *stages: int) -> None:
        for stage in stages:
            if stage in self._in_flight:
                raise ValueError(f"stage {stage} is in flight: call receive first")

    def _command(self, stage: int, operation: str, chunk: int) -> None:
        self._sequence += 1
        self._in_flight[stage] = chunk
        self._pool.send(Command(operation, stage, chunk, self._sequence))

    def _note_faults(self) -> None:
        report = self._pool.take_report()
        if not report:  # nearly always
            return
        for words in report.remarks:
            if words not in self._told:
                self._told.add(words)
                log.warning(words)
        self._unplayed += [
            unplayed_record(self.numbers[each.pop("row")], **each) for each in report.unplayed
        ]
        lossy = any(f["reason"] == FaultReason.NOT_REPLAYABLE.value for f in report.faults)
        for fault in report.faults:
            row = fault["row"]
            env = self.numbers[row] if row >= 0 else -1
            reason = FaultReason(fault["reason"])
            noted = EnvFault(env, reason, fault["detail"], fault["episode"])
            self._faults.append(noted)
            # What was lost for memory goes on, where it can; what cannot has its cause beside it.
            sound = reason is FaultReason.NOT_REPLAYABLE or (
                reason is FaultReason.MEMORY and not lossy
            )
            if not sound and not (self.config.leave_out_failing_tasks and fault["never_began"]):
                self._watch.note_fault(noted)
            if row >= 0 and row // (self.num_envs // self.stages) not in self._in_flight:
                # The next action of this row answers an observation that is gone.
                self._carried_invalid[row] = True

    def _collect(self, stage: int, chunk: int) -> VectorStep:
        part, block = self._slice(stage), self._block.arrays
        numbers, size = self.numbers, part.stop - part.start
        first, last = numbers[part.start], numbers[part.stop - 1]
        faults: tuple[EnvFault, ...] = ()
        if self._faults:
            faults = tuple(f for f in self._faults if f.env < 0 or first <= f.env <= last)
            self._faults = [fault for fault in self._faults if fault not in faults]
        final = block["final"][part].copy()
        finals = None
        if True in final.tolist():  # most chunks end no episode
            finals = {key: array[part][final] for key, array in self._finals.items()}
        valid = block["valid"][part] & ~self._carried_invalid[part]
        self._carried_invalid[part] = False
        terminations, truncations = np.zeros((2, size, chunk), bool)
        terminations[:, -1] = block["terminated"][part]
        truncations[:, -1] = block["truncated"][part]
        episodes: list[EpisodeRecord] = []
        told = block["recorded"][part].tolist()
        if True in told:
            rows = [row for row, yes in enumerate(told, part.start) if yes]
            episodes = [read_record(numbers[row], block["records"][row]) for row in rows]
        if self._unplayed:
            unplayed = [record for record in self._unplayed if first <= record.env <= last]
            self._unplayed = [record for record in self._unplayed if record not in unplayed]
            episodes += unplayed
        return VectorStep(
            observations=self.observations(stage),
            rewards=block["rewards"][part, :chunk].copy(),
            terminations=terminations,
            truncations=truncations,
            final_observations=finals,
            final_mask=final,
            valid=valid,
            active=block["active"][part].copy(),
            episode_ids=block["acted_episode"][part].copy(),
            reset_seeds=block["acted_seed"][part].copy(),
            faults=faults,
            episodes=tuple(episodes),
        )


def _check_division(num_envs: int, stages: int, group_size: int) -> None:
    if num_envs < 1 or num_envs % stages:
        raise ConfigError(f"{num_envs} envs do not divide into {stages} stages")
    if (num_envs // stages) % group_size:
        raise ConfigError(
            f"{num_envs // stages} envs per stage do not divide into groups of {group_size}; "
            f"nearest: {max(num_envs // stages // group_size, 1) * group_size}"
        )


def _plain(episodes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The (episode id, seed) list as plain values."""
    return [list(map(int, entry)) for entry in episodes]


def _usable_cores() -> list[int]:
    """The numbers of the cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
