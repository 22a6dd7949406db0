"""What every env must do, as checks that a user can run: ``rlinf check env NAME``."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psutil

from rlinf.conformance import CheckResult, outcome, require
from rlinf.envs.config import EnvConfig
from rlinf.envs.observation_names import depth_of, is_depth
from rlinf.envs.results import FaultReason, Observations, VectorStep
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import RunFailure

_ENVS = 4
_CHUNK = 5
_HORIZON = 7  # no multiple of the chunk: episodes end inside one
_ROUNDS = 4
_SEED = 20
_NEAR = 1e-2
_NEAR_IN_PICTURES, _PIXELS_APART = 2, 1e-3
"""Of what is not deterministic: levels of 255, and the part that may differ by more, at edges."""
"""How far starts of a simulator may be apart that is declared as not deterministic."""


@dataclass(frozen=True)
class Examined:
    """What the conformance suite found."""

    results: list[CheckResult]
    steps_per_second: float
    """Env steps with short episodes in 2 processes; NaN where the envs did not get so far."""


def check_env(config: EnvConfig, num_envs: int | None = None) -> list[CheckResult]:
    """Run the conformance suite on the env of ``config``, see :func:`examine_env`."""
    return examine_env(config, num_envs).results


def examine_env(
    config: EnvConfig,
    num_envs: int | None = None,
    show: Callable[[CheckResult], None] = lambda _: None,
) -> Examined:
    """Run the conformance suite on the env of ``config``, with short episodes.

    Works for every adapter, also one of another package. Takes some seconds for a light simulator.
    ``num_envs`` are open at once: by default 4, or 1 with ``one_at_a_time``. Each outcome is given
    to ``show`` as soon as it is there.

    Raises:
        ConfigError: The env cannot be built as configured.
        MissingPackageError: The simulator is not installed.
    """
    config.check()
    evidence = _Evidence(config, num_envs or (1 if config.one_at_a_time else _ENVS))
    results = []
    for name, check in CHECKS.items():
        results.append(outcome(name, check, evidence))
        show(results[-1])
    return Examined(results, evidence.steps_per_second)


@dataclass
class _Play:
    """What the envs did, in two processes."""

    spec: EnvSpec
    repeats: dict[str, bool]
    first: Observations
    steps: list[VectorStep]
    state: dict[str, Any]
    picture: np.ndarray | str
    processes: list[psutil.Process]
    seconds: float
    """Of the steps."""


class _Evidence:
    """Runs of the env that several checks look at; each happens once, when first asked for."""

    def __init__(self, config: EnvConfig, num_envs: int) -> None:
        self._config, self.num_envs = config, num_envs
        self.group_size = num_envs if num_envs % 2 else 2
        self._failures: dict[str, RunFailure] = {}

    @contextmanager
    def _opened(self, run: str, processes: int, **changes: Any) -> Iterator[SupervisedVectorEnv]:
        """The envs of one run. Its failure is kept: each check that looks at the run would else
        wait for the next one, as long as a simulator may take that never starts."""
        if run in self._failures:
            raise self._failures[run]
        plain = {
            "max_episode_steps": _HORIZON,
            "auto_reset": True,
            "ignore_terminations": False,
            "group_size": 1,
            "use_fixed_reset_states": False,
            "max_fault_rate": 1.0,
            "processes": processes,
        }
        config = self._config.model_copy(update={**plain, **changes})
        try:
            with SupervisedVectorEnv(config, num_envs=self.num_envs, seed=_SEED) as env:
                yield env
        except RunFailure as failure:
            self._failures[run] = failure
            raise

    @property
    def deterministic(self) -> bool:
        """Whether the simulator says that the same seed and actions give the same floats."""
        return self.play.repeats["deterministic"]

    @property
    def replayable(self) -> bool:
        """Whether the simulator says that its actions may be repeated."""
        return self.play.repeats["replayable"]

    @property
    def way_out(self) -> str:
        """What helps where a simulator cannot repeat itself, and does not say so."""
        own = hasattr(self._config.adapter_options, "deterministic")
        said = "options.deterministic: false" if own else "`deterministic = False` in its adapter"
        return f"; nearest: {said}, of what cannot repeat itself, as a real arm"

    @property
    def steps_per_second(self) -> float:
        """Env steps per second of the play, NaN where it failed."""
        if "play" not in vars(self):
            return math.nan
        return sum(step.rewards.size for step in self.play.steps[1:]) / self.play.seconds

    def alike(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two starts are the same, to the bit where the simulator can do that."""
        if self.deterministic:
            return np.array_equal(one, other)
        picture = one.dtype == np.uint8 and one.ndim > 3
        near = _NEAR_IN_PICTURES if picture else _NEAR
        apart = ~np.isclose(one.astype(np.float64), other.astype(np.float64), atol=near)
        allowed = _PIXELS_APART if picture else 0.0
        return bool(apart.mean() <= allowed)

    @cached_property
    def play(self) -> _Play:
        with self._opened("play", 2) as env:
            processes = [psutil.Process(number) for number in env.process_ids]
            first, actions = env.reset(), self.actions(env.env_spec)
            steps = [env.chunk_step(actions[0])]
            state = env.state_dict()
            begin = time.perf_counter()
            steps += map(env.chunk_step, actions[1:])
            seconds = time.perf_counter() - begin
            try:
                picture: np.ndarray | str = env.render(0)
            except RunFailure as error:
                picture = str(error).strip().splitlines()[-1]
            found = (first, steps, state, picture, processes, seconds)
            return _Play(env.env_spec, env.repeats, *found)

    @cached_property
    def replay(self) -> tuple[list[VectorStep], list[VectorStep], list[VectorStep]]:
        """The same in one process: from the start, from a saved state, after a kill."""
        actions, state = self.actions(self.play.spec), self.play.state
        with self._opened("replay", 1) as env:
            env.reset()
            steps = [env.chunk_step(chunk) for chunk in actions]
            env.load_state_dict(state)
            resumed = [env.chunk_step(chunk) for chunk in actions[1:]]
            env.load_state_dict(state)
            recovered = [env.chunk_step(actions[1])]
            os.kill(env.process_ids[0], signal.SIGKILL)
            recovered += map(env.chunk_step, actions[2:])
        return steps, resumed, recovered

    @cached_property
    def group(self) -> tuple[Observations, list[VectorStep], Observations, list[VectorStep]]:
        """In groups, with fixed reset states and terminations ignored: an epoch, a reset, and the
        first chunk again, its actions one by one."""
        deterministic = self.deterministic  # first: what cannot be played starts no second time
        changes = {
            "group_size": self.group_size,
            "use_fixed_reset_states": True,
            "ignore_terminations": True,
        }
        with self._opened("group", 1, **changes) as env:
            first = env.reset()
            actions = self.actions(env.env_spec)
            steps = [env.chunk_step(chunk) for chunk in actions]
            again = env.reset()
            alone = np.split(actions[0], _CHUNK, axis=1) if deterministic else []
            return first, steps, again, [env.chunk_step(action) for action in alone]

    def actions(self, spec: EnvSpec) -> np.ndarray:
        """Random chunks [rounds, n, C, A]; unbounded actions are drawn from [-1, 1]."""
        generator = np.random.default_rng(_SEED)
        shape = (_ROUNDS, self.num_envs, _CHUNK, spec.action_dim)
        if spec.choices is not None:
            return generator.integers(0, spec.choices, shape).astype(np.float32)
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        bounded = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        return generator.uniform(low, high, shape).astype(np.float32)


def _require_same(
    left: Sequence[VectorStep], right: Sequence[VectorStep], message: str, way_out: str
) -> None:
    names = ("rewards", "terminations", "truncations", "final_mask", "episode_ids", "reset_seeds")
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        for name in names:
            same = np.array_equal(getattr(one, name), getattr(other, name))
            require(same, f"{message}: {name} of chunk {number}{way_out}")
        for key, value in one.observations.items():
            same = np.array_equal(value, other.observations[key])
            require(same, f"{message}: observation '{key}' of chunk {number}{way_out}")


def _spaces(evidence: _Evidence) -> str:
    spec = evidence.play.spec
    for key, value in evidence.play.first.items():
        expected = (evidence.num_envs, *spec.observation_shapes[key])
        require(value.shape == expected, f"'{key}' is {value.shape} instead of {expected}")
    require(
        spec.choices is not None
        or all(low < high for low, high in zip(spec.action_low, spec.action_high, strict=True)),
        "an action's lower bound is not below its upper bound",
    )
    shapes = ", ".join(f"{key} {list(shape)}" for key, shape in spec.observation_shapes.items())
    return f"observations: {shapes}; actions: {spec.action_kind} [{spec.action_dim}]"


def _steps(evidence: _Evidence) -> str:
    for step in evidence.play.steps:
        require(step.valid.all(), "; ".join(fault.detail for fault in step.faults))
        expected = (evidence.num_envs, _CHUNK)
        require(step.rewards.shape == expected, f"rewards are {step.rewards.shape}")
    envs, processes = _counted(evidence.num_envs, "env"), len(evidence.play.processes)
    done = f"{_ROUNDS} chunks of {_CHUNK} actions in {envs} without a fault"
    rate = f"{evidence.steps_per_second:.0f} env steps/s"
    return f"{done}, {rate} with short episodes in {_counted(processes, 'process', 'es')}"


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count > 1 else ''}"


def _determinism(evidence: _Evidence) -> str:
    if not evidence.deterministic:
        return "declared as not deterministic"
    steps, _, _ = evidence.replay
    how = "in 1 and in 2 processes" if len(evidence.play.processes) > 1 else "in another process"
    message = f"the same seed does not give the same episodes, {how}"
    _require_same(evidence.play.steps, steps, message, evidence.way_out)
    return f"the same seed gives the same episodes, {how}"


def _initial_states(evidence: _Evidence) -> str:
    if evidence.num_envs == 1:
        return "of one env there is none to compare with"
    first = evidence.play.first.values()
    same = all(np.array_equal(value[0], value[1]) for value in first)
    return "every episode starts in the same state" if same else "episodes start in their own state"


def _auto_reset(evidence: _Evidence) -> str:
    steps = evidence.play.steps
    ended = sum(int(step.final_mask.sum()) for step in steps)
    require(ended, f"no episode ended within {_ROUNDS * _CHUNK} steps")
    for step in steps:
        for key, value in (step.final_observations or {}).items():
            expected = (int(step.final_mask.sum()), *step.observations[key].shape[1:])
            require(value.shape == expected, f"final '{key}' is {value.shape}, not {expected}")
    numbers = {record.episode_id for step in steps for record in step.episodes}
    require(len(numbers) == ended, f"{ended} episodes ended and {len(numbers)} were recorded")
    return f"{ended} episodes ended and were followed by another"


def _groups(evidence: _Evidence) -> str:
    first, *_ = evidence.group
    if evidence.num_envs == 1:
        return "of one env there is no group"
    for key, value in first.items():
        groups = value.reshape(-1, evidence.group_size, *value.shape[1:])
        same = evidence.alike(groups[:, :-1], groups[:, 1:])
        require(same, f"'{key}' differs between two envs of a group: reset ignores its seed")
    return "envs of a group start in the same state"


def _fixed_states(evidence: _Evidence) -> str:
    first, _, again, _ = evidence.group
    for key, value in first.items():
        require(evidence.alike(value, again[key]), f"'{key}' differs between two epochs")
    return "fixed reset states are the same in every epoch"


def _ignored_terminations(evidence: _Evidence) -> str:
    _, steps, _, _ = evidence.group
    require(not any(step.terminations.any() for step in steps), "an episode was terminated")
    return "only truncation ends an episode"


def _chunks(evidence: _Evidence) -> str:
    for step in evidence.play.steps:
        flags = step.terminations | step.truncations
        require(not flags[:, :-1].any(), "a flag stands before the last column")
        for record in step.episodes:
            length = record.episode_len
            require(
                length <= _HORIZON, f"an episode of {length} steps instead of at most {_HORIZON}"
            )
            rest = step.rewards[record.env, (length - 1) % _CHUNK + 1 :]
            require(not rest.any(), "actions after the end of an episode earned a reward")
    found = "flags in the last column; nothing is executed after the end of an episode"
    _, (whole, *_), _, alone = evidence.group
    if not alone:
        return found
    going = ~whole.final_mask  # not those that the simulator ended by itself
    differs = f"after the same start, {_CHUNK} actions in a chunk lead elsewhere than one by one"
    for column, step in enumerate(alone):
        same = np.array_equal(step.rewards[going, 0], whole.rewards[going, column])
        require(same, f"{differs}: reward of action {column}{evidence.way_out}")
    for key, value in whole.observations.items():
        same = np.array_equal(value[going], alone[-1].observations[key][going])
        require(same, f"{differs}: observation '{key}'{evidence.way_out}")
    return f"{found}; a chunk equals its actions one by one"


def _state(evidence: _Evidence) -> str:
    _, resumed, _ = evidence.replay
    given = evidence.play.state["simulator"]["size"].any()
    if not given and not evidence.replayable:
        return _given_up(resumed[0], evidence.num_envs)
    message = "going on from a saved state differs"
    _require_same(evidence.play.steps[1:], resumed, message, evidence.way_out)
    how = "the simulator's state" if given else "replaying the actions since the reset"
    return f"resumed by {how}, bitwise equal to never having stopped"


def _given_up(step: VectorStep, episodes: int) -> str:
    """What a simulator does whose actions must not be repeated: its episodes end as invalid."""
    closed = [fault for fault in step.faults if fault.reason is FaultReason.NOT_REPLAYABLE]
    require(len(closed) == episodes, f"{len(closed)} of {episodes} episodes were given up")
    require(not step.valid.any(), "a chunk that answers a lost observation counts as valid")
    return "declared as not replayable: its episodes are closed as invalid, others begin"


def _recovery(evidence: _Evidence) -> str:
    _, _, recovered = evidence.replay
    if not evidence.play.state["simulator"]["size"].any() and not evidence.replayable:
        return _given_up(recovered[1], evidence.num_envs)
    message = "after a killed process the envs go on differently"
    _require_same(evidence.play.steps[1:], recovered, message, evidence.way_out)
    return "a killed process is replaced and its envs go on where they were"


def _pictures(evidence: _Evidence) -> str:
    found = _depths(evidence)
    frame = evidence.play.picture
    if isinstance(frame, str):
        return f"not offered: {frame}{found}"
    require(
        frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8,
        f"a picture is {frame.dtype}{frame.shape} instead of uint8 [H, W, 3]",
    )
    for name, pictures in {"render": frame[None], **evidence.play.first}.items():
        if pictures.dtype == np.uint8:
            require(all(each.any() for each in pictures), f"{name}: a picture is black")
    return f"pictures of {frame.shape[1]} x {frame.shape[0]}, none of them black{found}"


def _depths(evidence: _Evidence) -> str:
    """From where to where depths go; those that are not finite are faults of the steps."""
    shapes, seen = evidence.play.spec.observation_shapes, [evidence.play.first]
    seen += [step.observations for step in evidence.play.steps]
    named = {depth_of(key): key for key in evidence.play.spec.pictures}
    nearest, farthest = math.inf, 0.0
    for key in filter(is_depth, shapes):
        if key in named:
            picture = shapes[named[key]]
            require(
                shapes[key] == picture[-3:-1],
                f"'{key}' is {list(shapes[key])}, its picture {named[key]} {list(picture)}",
            )
        for depth in (each[key] for each in seen):
            require(bool((depth > 0).all()), f"'{key}' holds {depth.min():g}, which is no distance")
            require(all(np.ptp(each) > 0 for each in depth), f"'{key}' is the same everywhere")
            nearest, farthest = min(nearest, depth.min()), max(farthest, depth.max())
    return f"; depths from {nearest:.3g} to {farthest:.3g} m" if farthest else ""


def _close(evidence: _Evidence) -> str:
    processes = evidence.play.processes
    left = [process.pid for process in processes if process.is_running()]
    require(not left, f"processes are left after close: {left}")
    return f"{_counted(len(processes), 'process', 'es')} ended"


CHECKS: dict[str, Callable[[_Evidence], str]] = {
    "spaces": _spaces,
    "steps": _steps,
    "same seed, same episodes": _determinism,
    "initial states": _initial_states,
    "auto-reset": _auto_reset,
    "groups": _groups,
    "fixed reset states": _fixed_states,
    "ignored terminations": _ignored_terminations,
    "chunks": _chunks,
    "save and resume": _state,
    "recovery": _recovery,
    "pictures": _pictures,
    "close": _close,
}
"""The suite: what is checked, and the function that raises when it is not met."""
