from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues, TrajectoryBuilder
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.results import VectorStep


def rollout(first_env: int, *, keep: bool, rows: int = 3) -> Trajectory:
    """Two envs that show 100 · env + 10 · episode + time; the second ends each episode after two
    steps, and then shows what comes next in a new episode."""
    ids = np.arange(first_env, first_env + 2)
    builder = TrajectoryBuilder(ids, rows, keep_next_observations=keep)
    episode, clock = np.zeros(2, int), np.zeros(2, int)

    def show() -> dict[str, np.ndarray]:
        return {"states": (100 * ids + 10 * episode + clock).astype(np.float32)[:, None]}

    for time in range(rows):
        seen = ObservationBatch(show(), ids, time, None, np.zeros(2, bool))
        clock += 1
        ended = np.array([False, clock[1] == 2])
        final = {"states": show()["states"][ended]} if ended.any() else None
        episode[ended], clock[ended] = episode[ended] + 1, 0
        step = VectorStep(
            observations=show(),
            rewards=np.zeros((2, 1), np.float32),
            terminations=np.zeros((2, 1), bool),
            truncations=ended[:, None],
            final_observations=final,
            final_mask=ended,
            valid=np.ones(2, bool),
            active=np.ones(2, bool),
            episode_ids=episode.copy(),
            reset_seeds=np.zeros(2, np.int64),
            faults=(),
            episodes=(),
        )
        zeros = np.zeros((2, 1, 1), np.float32)
        builder.add(seen, PolicyBatch(zeros, zeros, {"raw_actions": zeros}, 0), step)
    nothing = np.zeros((rows, 2, 0), np.float32)
    return Trajectory.from_arrays(builder.build(RolloutValues(nothing, nothing, nothing[0])))


def test_the_end_of_an_episode_leads_to_its_own_last_observation() -> None:
    trajectory = rollout(0, keep=True)
    following = trajectory.next_observations["states"][:, :, 0]
    assert following[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert following[:, 1].tolist() == [101.0, 102.0, 111.0]
    assert trajectory.forward_inputs["states"][2, 1].tolist() == [110.0]


def test_what_followed_is_kept_only_on_demand_and_joined_like_the_rest() -> None:
    assert rollout(0, keep=False).next_observations == {}
    joined = concatenate([rollout(2, keep=True), rollout(0, keep=True)])
    assert joined.next_observations["states"][0, :, 0].tolist() == [1.0, 101.0, 201.0, 301.0]
    again = Trajectory.from_tensors(joined.to_tensors())
    assert torch.equal(again.next_observations["states"], joined.next_observations["states"])


def test_who_steps_the_simulators_needs_no_torch() -> None:
    code = "import sys, rlinf.workers.env; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
