"""Observations of the steps before, beside the present one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pydantic import ValidationError

from rlinf.envs.base import (
    INSTRUCTION_KEY,
    INSTRUCTION_SHAPE,
    SimulatorEnv,
    instruction_bytes,
    observation_space,
)
from rlinf.envs.config import EnvConfig
from rlinf.envs.recording import record_episodes
from rlinf.envs.supervised.successive import successive
from rlinf.envs.supervised.vector import SupervisedVectorEnv

from .test_state import resume_equals_going_on


def drawn(rounds: int, chunk: int) -> np.ndarray:
    actions = np.random.default_rng(0).uniform(-1, 1, (rounds, 2, chunk, 2))
    return actions.astype(np.float32)


def test_they_are_what_was_shown_before_whatever_the_chunk(point) -> None:
    config = point(observation_steps=3, ignore_terminations=True, max_episode_steps=10)
    actions = drawn(3, 4)
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        shapes = env.env_spec.observation_shapes
        assert shapes == {"states": (2,), "states@1": (2,), "states@2": (2,)}
        assert env.env_spec.observation_steps == 3
        first = {key: value.copy() for key, value in env.reset().items()}
        seen = [first["states"], first["states"], first["states"]]
        for number in range(12):
            step = env.chunk_step(actions[number // 4][:, [number % 4]])
            ended = number == 9
            now = step.final_observations if ended else step.observations
            seen.append(now["states"].copy())
            for back in (1, 2):
                np.testing.assert_array_equal(now[f"states@{back}"], seen[-1 - back])
            if ended:
                assert step.truncations.all()
                anew = step.observations["states"].copy()
                seen = [anew] * 3
                np.testing.assert_array_equal(step.observations["states@2"], anew)
    np.testing.assert_array_equal(first["states@1"], first["states"])
    assert not np.array_equal(seen[-1], seen[-2])
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.reset()
        for chunk in actions[:2]:
            step = env.chunk_step(chunk)
            assert not step.final_mask.any()
        found = step.observations
        singles = _singles(config, actions)
        for back in (0, 1, 2):
            name = f"states@{back}" if back else "states"
            np.testing.assert_array_equal(found[name], singles[7 - back])
        step = env.chunk_step(actions[2])  # the limit of ten comes in its middle
        for back in (0, 1, 2):
            name = f"states@{back}" if back else "states"
            np.testing.assert_array_equal(step.final_observations[name], singles[9 - back])


def _singles(config: EnvConfig, actions: np.ndarray) -> list[np.ndarray]:
    """By step what was seen after it, one action at a time, up to the end of the episode."""
    with SupervisedVectorEnv(config, num_envs=2, seed=0) as env:
        env.reset()
        found = []
        for number in range(10):
            step = env.chunk_step(actions[number // 4][:, [number % 4]])
            shown = step.final_observations or step.observations
            found.append(shown["states"].copy())
    return found


class _Counting(SimulatorEnv):
    """Counts its steps and how often it was looked at."""

    skips_observations = True

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.observation_space = observation_space(
            {"states": (1,), INSTRUCTION_KEY: INSTRUCTION_SHAPE}
        )
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.steps = np.zeros(1, np.float32)
        self.looks = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps[:] = 0
        return {"states": self.steps, INSTRUCTION_KEY: instruction_bytes("count")}, {}

    def step_blind(self, action: Any) -> Any:
        self.steps += 1
        return 0.0, False, False, {}

    def observe(self) -> Any:
        self.looks += 1
        return {"states": self.steps, INSTRUCTION_KEY: instruction_bytes("count")}


def test_of_a_simulator_that_leaves_observations_out() -> None:
    assert successive(_Counting, 1) is _Counting
    env: Any = successive(_Counting, 3)(None)
    assert set(env.observation_space.spaces) == {"states", "states@1", "states@2", INSTRUCTION_KEY}
    first, _ = env.reset()
    assert [first[name].item() for name in ("states", "states@1", "states@2")] == [0, 0, 0]
    for _ in range(2):
        env.step_blind(0)
    env.step(0)
    shown, *_ = env.step(0)
    # Arrays are the simulator's own: what it writes into them later does not change the past.
    assert [shown[name].item() for name in ("states", "states@1", "states@2")] == [4, 3, 0]
    assert env.looks == 2
    assert env.observe()["states@1"].item() == 4


class _Beginning(_Counting):
    """Begins an episode while it is built, to see what it shows."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.reset(seed=0)


def test_of_a_simulator_that_begins_an_episode_while_it_is_built() -> None:
    env: Any = successive(_Beginning, 2)(None)
    env.step(0)
    first, _ = env.reset()
    assert [first[name].item() for name in ("states", "states@1")] == [0, 0]


def test_pictures_are_drawn_of_the_last_steps_of_a_chunk_alone() -> None:
    """MetaWorld by the state of its simulator; goes on equal to the bit."""
    options = {"task": "reach-v3", "images": True, "image_size": 32}
    config = EnvConfig(
        type="metaworld", options=options, max_episode_steps=14, processes=2, observation_steps=2
    )
    state = resume_equals_going_on(config, chunk=4)
    assert state["simulator"]["size"].all()
    now, before = (state["observation"][name] for name in ("main_images", "main_images@1"))
    assert now.shape == before.shape == (4, 32, 32, 3)
    assert (now != before).any(axis=(1, 2, 3)).all()


def test_a_replay_remembers_as_well() -> None:
    config = EnvConfig(
        type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=25, processes=2,
        observation_steps=3,
    )  # fmt: skip
    resume_equals_going_on(config, chunk=3)


def test_sets_hold_each_observation_once(point) -> None:
    def stay(spec: Any) -> Any:
        assert spec.observation_steps == 2
        return lambda observations: np.zeros((len(observations["states@1"]), 1, 2), np.float32)

    spec, episodes = record_episodes(
        point(observation_steps=2, max_episode_steps=3), stay, [(0, 1), (1, 2)], num_envs=2
    )
    assert set(spec.observation_shapes) == {"states"}
    assert all(set(each.observations) == {"states"} for each in episodes)


def test_a_batch_has_none(point) -> None:
    with pytest.raises(ValidationError, match=r"steps a batch, .* nearest: 1"):
        point(type="point_batch", observation_steps=2)
