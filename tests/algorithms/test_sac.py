from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlinf.algorithms.sac import (
    chunk_returns,
    critic_terms,
    policy_terms,
    polyak_update,
    soft_targets,
    temperature_terms,
    transitions,
)
from tests.algorithms.rollouts import flags, random_trajectory


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_terms_equal_a_loop_over_rows_and_heads() -> None:
    rows, heads, alpha = 5, 3, 0.3
    rewards, log_probs = normal(rows), normal(rows, seed=1)
    values, next_values = normal(heads, rows, seed=2), normal(heads, rows, seed=3)
    discounts = torch.tensor([0.9, 0.0, 0.9, 0.0, 0.9])
    targets = soft_targets(
        rewards=rewards,
        discounts=discounts,
        next_values=next_values,
        next_log_probs=log_probs,
        alpha=torch.tensor(alpha),
    )
    squares = critic_terms(values=values, targets=targets)
    policy = policy_terms(values=values, log_probs=log_probs, alpha=torch.tensor(alpha))
    for row in range(rows):
        lowest = min(float(next_values[head, row]) for head in range(heads))
        soft = lowest - alpha * float(log_probs[row])
        target = float(rewards[row]) + float(discounts[row]) * soft
        assert float(targets[row]) == pytest.approx(target, abs=1e-6)
        errors = [(float(values[head, row]) - target) ** 2 for head in range(heads)]
        assert float(squares[row]) == pytest.approx(sum(errors) / heads, abs=1e-5)
        worst = min(float(values[head, row]) for head in range(heads))
        expected = alpha * float(log_probs[row]) - worst
        assert float(policy[row]) == pytest.approx(expected, abs=1e-6)


def test_temperature_rises_exactly_where_there_is_too_little_entropy() -> None:
    for entropy, sign in ((-5.0, -1.0), (-3.0, 1.0)):
        log_alpha = torch.tensor(math.log(0.2), requires_grad=True)
        terms = temperature_terms(
            alpha=log_alpha.exp(), log_probs=torch.full((4,), -entropy), target_entropy=-4.0
        )
        terms.mean().backward()
        # d/dlog α of −α (log π + H̄) is −α (log π + H̄).
        assert log_alpha.grad is not None
        assert float(log_alpha.grad) == pytest.approx(-0.2 * (-entropy - 4.0), abs=1e-6)
        assert math.copysign(1.0, float(log_alpha.grad)) == sign


def test_optimal_soft_values_of_one_state_are_a_fixed_point() -> None:
    """One state, two equal actions with reward 1: V = (1 + α log 2) / (1 − γ)."""
    alpha, gamma = 0.5, 0.9
    value = (1 + alpha * math.log(2)) / (1 - gamma)
    q = torch.full((2, 1), 1 + gamma * value, dtype=torch.float64)
    found = soft_targets(
        rewards=torch.ones(1, dtype=torch.float64),
        discounts=torch.full((1,), gamma, dtype=torch.float64),
        next_values=q,
        next_log_probs=torch.full((1,), math.log(0.5), dtype=torch.float64),
        alpha=torch.tensor(alpha, dtype=torch.float64),
    )
    torch.testing.assert_close(found, q[0])


def test_rewards_of_a_chunk_are_discounted_within_it() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0]])
    expected = torch.tensor([1 + 0.5 * 2 + 0.25 * 4, 0.5])
    torch.testing.assert_close(chunk_returns(rewards, 0.5), expected)


def test_targets_follow_by_the_share_tau() -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in target.parameters()]
    polyak_update(target, source, 0.25)
    for old, new, towards in zip(before, target.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * towards)
    assert all(parameter.grad is None for parameter in source.parameters())


def test_transitions_bootstrap_at_a_time_limit_and_not_at_an_end() -> None:
    steps, envs = 4, 2
    trajectory = random_trajectory(
        steps=steps,
        envs=envs,
        chunk=2,
        truncations=flags(steps, envs, [(1, 0)], chunk=2),
        terminations=flags(steps, envs, [(2, 1)], chunk=2),
        next_observations={"states": normal(steps, envs, 3, seed=7)},
        versions=torch.arange(steps).unsqueeze(1).expand(steps, envs).clone(),
    )
    rows = transitions(trajectory, gamma=0.5)
    assert rows["discounts"].view(steps, envs).tolist() == [[0.25] * 2, [0.25] * 2, [0.25, 0.0],
                                                            [0.25] * 2]  # fmt: skip
    assert torch.equal(rows["next.states"].view(steps, envs, 3),
                       trajectory.next_observations["states"])  # fmt: skip
    assert torch.equal(rows["states"][envs], trajectory.forward_inputs["states"][1, 0])
    assert rows["versions"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_spoilt_and_idle_rows_are_no_transitions() -> None:
    valid = torch.ones(4, 2, dtype=torch.bool)
    valid[:2, 0] = False
    trajectory = random_trajectory(
        steps=4,
        envs=2,
        valid=valid,
        auto_reset=False,
        terminations=flags(4, 2, [(2, 1)]),
        next_observations={"states": normal(4, 2, 3)},
    )
    rows = transitions(trajectory, gamma=0.9)
    expected = [(0, 1), (1, 1), (2, 0), (2, 1), (3, 0)]
    wanted = torch.stack([trajectory.forward_inputs["states"][t, b] for t, b in expected])
    assert torch.equal(rows["states"], wanted)
