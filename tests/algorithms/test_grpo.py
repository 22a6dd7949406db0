from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlinf.algorithms.config import GRPOConfig
from rlinf.algorithms.grpo import GRPO
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.errors import ConfigError, RunFailure
from tests.algorithms.rollouts import flags, random_trajectory


def build(group_size: int = 2, **options: Any) -> GRPO:
    return GRPOConfig(**options).build(family="actions", group_size=group_size)


def grouped(envs: int, group_size: int, steps: int = 6, **replaced: Any) -> Trajectory:
    """A rollout without automatic reset whose groups share their reset seeds."""
    seeds = (torch.arange(envs) // group_size).expand(steps, envs).clone()
    options = {"reset_seeds": seeds, "value_dim": 0, "auto_reset": False} | replaced
    return random_trajectory(steps=steps, envs=envs, **options)


def test_advantages_are_group_relative_returns() -> None:
    trajectory = grouped(6, 3, chunk=2, truncations=flags(6, 6, [(5, e) for e in range(6)], 2))
    batch, metrics = build(3).prepare(trajectory)
    returns = trajectory.rewards.double().sum((0, 2)).numpy().reshape(2, 3)
    centred = returns - returns.mean(1, keepdims=True)
    expected = (centred / (returns.std(1, ddof=1, keepdims=True) + 1e-6)).flatten()
    by_env = batch.advantages.view(6, 6)
    for row in by_env:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5)
    assert batch.weights is None
    assert batch.returns is None
    assert metrics["rollout/trained_episodes"] == 6


def test_steps_after_the_end_are_neither_scored_nor_trained_on() -> None:
    rewards = torch.zeros(6, 4, 1)
    rewards[2, 0] = 1.0
    rewards[4, 0] = 100.0  # after the end of environment 0's episode
    ends = flags(6, 4, [(2, 0)]) | flags(6, 4, [(5, e) for e in range(4)])
    batch, _ = build(2).prepare(grouped(4, 2, rewards=rewards, terminations=ends))
    advantages = batch.advantages.view(6, 4)
    # Scores 1 and 0: ±0.5 over a sample deviation of √½.
    assert advantages[:3, 0].tolist() == pytest.approx([0.5 / (0.5**0.5 + 1e-6)] * 3)
    assert advantages[0, 1].item() == pytest.approx(-advantages[0, 0].item())
    assert batch.weights is not None
    weights = batch.weights.view(6, 4)
    assert weights[:, 0].tolist() == [2.0] * 3 + [0.0] * 3
    assert weights[:, 1:].unique().tolist() == [1.0]


def test_several_episodes_of_one_rollout_are_compared_one_by_one() -> None:
    """Automatic reset with episodes of 3 rows: each is scored among its own reset state."""
    episode_ids = torch.arange(2).repeat_interleave(3).unsqueeze(1) * 10 + torch.arange(4)
    seeds = torch.arange(2).repeat_interleave(3).unsqueeze(1) * 10 + torch.arange(4) // 2
    ends = flags(6, 4, [(row, env) for row in (2, 5) for env in range(4)])
    trajectory = random_trajectory(
        truncations=ends, episode_ids=episode_ids, reset_seeds=seeds, value_dim=0
    )
    batch, metrics = build(2).prepare(trajectory)
    advantages = batch.advantages.view(6, 4)
    scores = trajectory.rewards[..., 0].view(2, 3, 4).double().sum(1)
    for episode in range(2):
        for group in range(2):
            pair = scores[episode, 2 * group : 2 * group + 2]
            expected = (pair - pair.mean()) / (pair.std() + 1e-6)
            torch.testing.assert_close(
                advantages[3 * episode, 2 * group : 2 * group + 2].double(),
                expected,
                rtol=1e-5,
                atol=1e-6,
            )
    assert metrics["rollout/trained_episodes"] == 8


def test_a_spoilt_episode_is_left_out_of_its_group() -> None:
    valid = torch.ones(6, 3, dtype=torch.bool)
    valid[3, 0] = False
    ends = flags(6, 3, [(5, 1), (5, 2)])
    trajectory = grouped(3, 3, valid=valid, truncations=ends)
    batch, metrics = build(3).prepare(trajectory)
    scores = trajectory.rewards[:, 1:, 0].sum(0)
    expected = (scores - scores.mean()) / (scores.std() + 1e-6)
    assert metrics["rollout/trained_episodes"] == 2
    # Rows 0 to 3 of environment 0 are gone; rows 4 and 5 belong to no whole episode.
    assert len(batch) == 18 - 4
    assert batch.advantages[:2, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert batch.weights is not None
    assert int((batch.weights == 0).sum()) == 2


def test_an_episode_that_goes_on_into_the_next_rollout_is_not_scored_twice() -> None:
    algorithm, restored = build(2), build(2)
    first = grouped(4, 2, truncations=flags(6, 4, [(5, 2), (5, 3)]))
    algorithm.prepare(first)
    restored.load_state_dict(algorithm.state_dict())
    following = torch.arange(4).expand(6, 4).clone()
    following[:, 2:] += 4
    second = grouped(
        4, 2, truncations=flags(6, 4, [(5, e) for e in range(4)]), episode_ids=following
    )
    for each in (algorithm, restored):
        batch, metrics = each.prepare(second)
        assert metrics["rollout/trained_episodes"] == 2
        assert batch.weights is not None
        assert not bool(batch.weights.view(6, 4)[:, :2].any())


def test_neither_is_one_whose_environment_gets_rows_in_front() -> None:
    """Those of environments 2 and 3 were topped up after a fault."""
    algorithm = build(2)
    begun = torch.arange(10, 14).expand(6, 4).clone()
    ends = flags(6, 4, [(5, 2), (5, 3)])
    algorithm.prepare(grouped(4, 2, truncations=ends, episode_ids=begun))

    def part(envs: list[int], steps: int, begins: int) -> Trajectory:
        ids = torch.tensor(envs).expand(steps, 2) + begins
        return random_trajectory(
            steps=steps, envs=2, value_dim=0, auto_reset=False, env_ids=torch.tensor(envs),
            episode_ids=ids.clone(), truncations=flags(steps, 2, [(steps - 1, 0), (steps - 1, 1)]),
        )  # fmt: skip

    batch, metrics = algorithm.prepare(concatenate([part([0, 1], 6, 10), part([2, 3], 8, 20)]))
    assert metrics["rollout/trained_episodes"] == 2
    assert batch.weights is not None
    assert batch.weights[batch.groups < 2].unique().tolist() == [0.0]
    assert batch.weights[batch.groups >= 2].unique().tolist() == [1.0]


def test_a_fault_elsewhere_does_not_change_the_shares_of_episodes() -> None:
    """With automatic reset every trained row counts once, however many its environment has."""
    valid = torch.ones(8, 4, dtype=torch.bool)
    valid[3, 3] = False
    ends = flags(8, 4, [(3, 2), *((7, env) for env in range(3)), (7, 3)])
    episodes = torch.arange(4).expand(8, 4).clone()
    episodes[4:, 2] = 9  # of its group alone, so not compared
    seeds = torch.zeros(8, 4, dtype=torch.int64)
    seeds[4:, 2] = 5
    batch, _ = build(4).prepare(
        random_trajectory(
            steps=8, value_dim=0, valid=valid, truncations=ends, episode_ids=episodes,
            reset_seeds=seeds,
        )
    )  # fmt: skip
    assert batch.weights is not None
    assert batch.weights.unique().tolist() == [0.0, 1.0]


def test_groups_outside_the_reward_bounds_are_left_out() -> None:
    rewards = torch.zeros(6, 6, 1)
    rewards[0, :, 0] = torch.tensor([5.0, 5.0, 0.0, 5.0, 0.0, 0.0])
    trajectory = grouped(6, 2, rewards=rewards)
    options = {"filter_rewards": True, "rewards_lower_bound": 0.5, "rewards_upper_bound": 4.5}
    batch, metrics = build(2, **options).prepare(trajectory)
    assert batch.weights is not None
    assert batch.weights.view(6, 6)[0].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert metrics["rollout/trained_episodes"] == 2


def test_a_global_batch_without_weight_has_no_loss() -> None:
    algorithm = build(2)
    batch, _ = algorithm.prepare(grouped(4, 2, terminations=flags(6, 4, [(0, 0)])))
    assert batch.weights is not None
    idle = batch.select(batch.weights == 0)

    class Outcome:
        log_probs = torch.randn(len(idle), 1, 2)
        values = torch.zeros(len(idle), 0)
        entropy = torch.zeros(len(idle), 1, 2)

    loss, metrics = algorithm.loss(Outcome(), idle, normalizer=algorithm.normalizer(idle))
    assert loss.item() == 0.0
    assert metrics["actor/ratio"].item() == 0.0


def test_without_groups_to_compare_the_run_stops() -> None:
    with pytest.raises(RunFailure, match="no group of the rollout has two complete episodes"):
        build(2).prepare(random_trajectory(value_dim=0, reset_seeds=torch.arange(4).expand(6, 4)))
    with pytest.raises(ConfigError, match="nearest: 2"):
        build(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_rewards": True}, "needs both bounds"),
        ({"rewards_lower_bound": 0.5}, "no effect without filter_rewards"),
        (
            {"filter_rewards": True, "rewards_lower_bound": 2.0, "rewards_upper_bound": 1.0},
            "nearest: 2.0",
        ),
    ],
)
def test_illegal_bounds_say_what_and_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**options)


def test_it_says_what_it_needs() -> None:
    assert not GRPOConfig().needs_values
    assert GRPOConfig().needs_groups
    algorithm = build(4)
    assert not algorithm.needs_reference
    assert algorithm.value_dim(3) == 0
