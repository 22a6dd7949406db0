from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.algorithms.base_config import BootstrapType
from rlinf.algorithms.credit import (
    decision_steps,
    episode_length_weights,
    generalized_advantages,
    group_advantages,
    idle_rows,
    normalize,
    per_row,
)
from rlinf.data.trajectory import Trajectory
from tests.algorithms.rollouts import flags, random_trajectory

GAMMA, LAMBDA = 0.9, 0.8


def brute_force(
    trajectory: Trajectory, env: int, bootstrap_type: BootstrapType, gamma: float, lam: float
) -> np.ndarray:
    """Σ_l (γλ)^l δ_{t+l} up to the end of the episode, for chunks of one primitive step."""
    rewards = trajectory.rewards[:, env, 0].double().numpy()
    values = trajectory.values[:, env, 0].double().numpy()
    final = trajectory.final_values[:, env, 0].double().numpy()
    last = trajectory.bootstrap_values[env, 0].double().item()
    terminated = trajectory.terminations[:, env, 0].numpy()
    truncated = trajectory.truncations[:, env, 0].numpy()
    steps = len(rewards)
    advantages = np.zeros(steps)
    for start in range(steps):
        for offset in range(steps - start):
            t = start + offset
            if terminated[t] or truncated[t]:
                bootstraps = {
                    "standard": truncated[t] and not terminated[t],
                    "always": True,
                    "none": False,
                }[bootstrap_type]
                following = final[t] if bootstraps else 0.0
            else:
                following = values[t + 1] if t + 1 < steps else last
            advantages[start] += (gamma * lam) ** offset * (
                rewards[t] + gamma * following - values[t]
            )
            if terminated[t] or truncated[t]:
                break
    return advantages


def gae(trajectory: Trajectory, bootstrap_type: BootstrapType) -> torch.Tensor:
    steps = decision_steps(trajectory, reward_type="chunk_level", bootstrap_type=bootstrap_type)
    advantages, returns = generalized_advantages(
        steps=steps, rewards=steps.rewards, gamma=GAMMA, gae_lambda=LAMBDA
    )
    torch.testing.assert_close(returns, advantages + steps.values)
    return advantages


@pytest.mark.parametrize("bootstrap_type", ["standard", "always", "none"])
def test_gae_equals_the_double_sum(bootstrap_type: BootstrapType) -> None:
    ends = flags(12, 4, [(3, 0), (11, 1), (0, 2), (5, 2)])
    truncations = flags(12, 4, [(7, 0), (5, 2), (4, 3)])
    final_values = torch.randn(12, 4, 1) * (ends | truncations)
    trajectory = random_trajectory(
        steps=12, terminations=ends, truncations=truncations, final_values=final_values
    )
    advantages = gae(trajectory, bootstrap_type)
    for env in range(4):
        expected = brute_force(trajectory, env, bootstrap_type, GAMMA, LAMBDA)
        np.testing.assert_allclose(advantages[:, env].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_lambda_one_gives_discounted_returns() -> None:
    trajectory = random_trajectory(steps=5, envs=1, terminations=flags(5, 1, [(4, 0)]))
    steps = decision_steps(trajectory, reward_type="chunk_level", bootstrap_type="standard")
    _, returns = generalized_advantages(
        steps=steps, rewards=steps.rewards, gamma=0.5, gae_lambda=1.0
    )
    rewards = trajectory.rewards.flatten().tolist()
    expected = [
        sum(0.5**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))
    ]
    assert returns.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_standard_bootstrap_equals_adding_the_final_value_to_the_reward() -> None:
    """The formulation of Pardo et al.: r + γ V(final) at a truncation, then a hard boundary."""
    truncations = flags(8, 3, [(2, 0), (7, 1)])
    trajectory = random_trajectory(
        steps=8, envs=3, truncations=truncations, final_values=torch.randn(8, 3, 1) * truncations
    )
    injected = random_trajectory(
        steps=8,
        envs=3,
        truncations=truncations,
        rewards=trajectory.rewards + GAMMA * trajectory.final_values,
    )
    torch.testing.assert_close(gae(trajectory, "standard"), gae(injected, "none"))


def test_action_level_is_a_rollout_of_primitive_steps() -> None:
    """A rollout of chunks equals the one of chunk length 1 that does the same steps."""
    rows, envs, chunk = 4, 2, 3
    truncations = flags(rows, envs, [(1, 0)], chunk)
    final_values = torch.randn(rows, envs, chunk) * truncations.any(-1, keepdim=True)
    trajectory = random_trajectory(
        steps=rows,
        envs=envs,
        chunk=chunk,
        value_dim=chunk,
        truncations=truncations,
        final_values=final_values,
    )
    steps = decision_steps(trajectory, reward_type="action_level", bootstrap_type="standard")
    advantages, _ = generalized_advantages(
        steps=steps, rewards=steps.rewards, gamma=GAMMA, gae_lambda=LAMBDA
    )

    def primitive(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).reshape(rows * chunk, envs, 1)

    placed = torch.zeros(rows, envs, chunk)
    placed[..., -1] = final_values[..., 0]
    flat = random_trajectory(
        steps=rows * chunk,
        envs=envs,
        rewards=primitive(trajectory.rewards),
        values=primitive(trajectory.values),
        truncations=primitive(truncations),
        final_values=primitive(placed),
        bootstrap_values=trajectory.bootstrap_values[:, :1],
    )
    torch.testing.assert_close(advantages, gae(flat, "standard"))
    by_row = per_row(advantages, rows)
    assert by_row.shape == (rows, envs, chunk)
    torch.testing.assert_close(by_row[2, 1, 1], advantages[2 * chunk + 1, 1])


def test_chunk_level_sums_the_rewards_of_a_chunk() -> None:
    trajectory = random_trajectory(chunk=3)
    steps = decision_steps(trajectory, reward_type="chunk_level", bootstrap_type="none")
    torch.testing.assert_close(steps.rewards, trajectory.rewards.sum(-1))


def test_a_critic_of_another_granularity_is_refused() -> None:
    with pytest.raises(ValueError, match="need 3 values per row"):
        decision_steps(
            random_trajectory(chunk=3, value_dim=1),
            reward_type="action_level",
            bootstrap_type="none",
        )


def test_a_spoilt_row_ends_its_episode_whatever_it_holds() -> None:
    valid = torch.ones(6, 1, dtype=torch.bool)
    valid[2] = False
    rewards = torch.ones(6, 1, 1)
    rewards[2] = torch.nan
    values = torch.zeros(6, 1, 1)
    values[2] = torch.nan
    trajectory = random_trajectory(envs=1, valid=valid, rewards=rewards, values=values)
    advantages = gae(trajectory, "standard")
    assert bool(advantages.isfinite().all())
    after = random_trajectory(
        steps=3,
        envs=1,
        rewards=rewards[3:],
        values=values[3:],
        bootstrap_values=trajectory.bootstrap_values,
    )
    torch.testing.assert_close(advantages[3:], gae(after, "standard"))


def test_group_advantages_against_numpy() -> None:
    scores = torch.tensor([1.0, 2.0, 4.0, 0.0, 0.0, 5.0, 9.0], dtype=torch.float64)
    groups = torch.tensor([7, 3, 7, 3, 7, 3, 1])
    advantages, means, sizes = group_advantages(scores=scores, groups=groups)
    for group in (3, 7):
        members = scores[groups == group].numpy()
        expected = (members - members.mean()) / (members.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(advantages[groups == group].numpy(), expected)
        assert bool((means[groups == group] == members.mean()).all())
        assert bool((sizes[groups == group] == 3).all())
    assert advantages[6] == 0
    assert sizes[6] == 1


def test_normalisation_counts_only_what_is_trained_on() -> None:
    advantages = torch.tensor([[1.0], [3.0], [8.0], [100.0]])
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0])
    normal = normalize(advantages, weights=weights)
    counted = np.array([1.0, 3.0, 8.0])
    expected = (counted - counted.mean()) / (counted.std(ddof=1) + 1e-5)
    np.testing.assert_allclose(normal[:3, 0].numpy(), expected, rtol=1e-6)
    everything = normalize(advantages)
    torch.testing.assert_close(everything.mean(), torch.tensor(0.0))
    assert normalize(advantages[:1]).item() == 1.0


def test_rows_after_an_episode_that_is_not_reset_are_idle() -> None:
    trajectory = random_trajectory(
        envs=2, auto_reset=False, terminations=flags(6, 2, [(2, 0), (3, 0)])
    )
    assert idle_rows(trajectory)[:, 0].tolist() == [False] * 3 + [True] * 3
    assert not bool(idle_rows(trajectory)[:, 1].any())


def test_rows_after_an_automatic_reset_are_not_idle() -> None:
    trajectory = random_trajectory(envs=2, terminations=flags(6, 2, [(2, 0)]))
    assert not bool(idle_rows(trajectory).any())


def test_length_weights_give_every_environment_the_same_share() -> None:
    active = torch.tensor([[True, True], [True, True], [False, True], [False, True]])
    weights = episode_length_weights(active)
    assert weights.tolist() == [[2.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
