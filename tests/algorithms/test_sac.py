from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import SACConfig
from rlinf.algorithms.sac import (
    SAC,
    chunk_returns,
    critic_terms,
    policy_terms,
    polyak_update,
    soft_targets,
    temperature_terms,
)
from rlinf.models.config import SquashedMLPConfig
from tests.algorithms.rollouts import flags, random_trajectory
from tests.models.test_policies import env_spec


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


def sac(**settings: Any) -> SAC:
    return SAC(SACConfig(gamma=0.5, **settings))


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
    batch, _ = sac().prepare(trajectory)
    discounts = batch.inputs["discounts"].view(steps, envs)
    assert discounts.tolist() == [[0.25, 0.25], [0.25, 0.25], [0.25, 0.0], [0.25, 0.25]]
    following = batch.inputs["next.states"].view(steps, envs, 3)
    assert torch.equal(following, trajectory.next_observations["states"])
    assert torch.equal(batch.inputs["states"][envs], trajectory.forward_inputs["states"][1, 0])
    expected = trajectory.rewards[..., 0] + 0.5 * trajectory.rewards[..., 1]
    torch.testing.assert_close(batch.rewards.view(steps, envs), expected)
    assert batch.versions[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.truncated.nonzero().flatten().tolist() == [2]
    assert torch.equal(batch.groups, trajectory.episode_ids.flatten())


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
    batch, _ = sac().prepare(trajectory)
    expected = [(0, 1), (1, 1), (2, 0), (2, 1), (3, 0)]
    wanted = torch.stack([trajectory.forward_inputs["states"][t, b] for t, b in expected])
    assert torch.equal(batch.inputs["states"], wanted)
    assert bool(batch.valid.all())


MODEL = SquashedMLPConfig(
    hidden_sizes=(8,), q_hidden_sizes=(8,), num_action_chunks=2, policy_gain=1.0
)


def networks(algorithm: SAC) -> dict[str, nn.Module]:
    spec = env_spec(
        observation_shapes={"states": (3,)},
        action_dim=2,
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
    )
    return algorithm.modules(MODEL, spec, seed=1)


def drawn(algorithm: SAC, rows: int = 12) -> Batch:
    trajectory = random_trajectory(
        steps=rows // 4,
        chunk=2,
        terminations=flags(rows // 4, 4, [(1, 1)], chunk=2),
        next_observations={"states": normal(rows // 4, 4, 3, seed=7)},
    )
    batch, _ = algorithm.prepare(trajectory)
    return algorithm.with_noise(batch, torch.Generator().manual_seed(5))


def gradients(loss: torch.Tensor, modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    parameters = {f"{n}.{k}": p for n, m in modules.items() for k, p in m.named_parameters()}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


@pytest.mark.parametrize("name", ["critic", "policy", "temperature"])
def test_losses_and_gradients_of_micro_batches_add_up(name: str) -> None:
    algorithm = sac(initial_temperature=0.3)
    modules, batch = networks(algorithm), drawn(algorithm)
    loss = {each.name: each for each in algorithm.losses()}[name]
    assert loss.parameters == (name,)
    normalizer = algorithm.normalizer(batch)
    whole, metrics = loss.of(modules, batch, normalizer)
    wanted = gradients(whole, modules)
    assert any(key.startswith(f"{name}.") for key in wanted)
    parts = [loss.of(modules, part, normalizer) for part in batch.split(5)]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    for key in metrics:
        torch.testing.assert_close(sum(each[key] for _, each in parts), metrics[key])
    pieces = [gradients(value, modules) for value, _ in parts]
    for key, gradient in wanted.items():
        torch.testing.assert_close(sum(piece[key] for piece in pieces), gradient)


def test_losses_equal_a_loop_over_transitions() -> None:
    algorithm, alpha = sac(initial_temperature=0.3, target_entropy=-1.5), 0.3
    modules, batch = networks(algorithm), drawn(algorithm)
    critic = policy = temperature = 0.0
    for row in range(len(batch)):
        inputs = batch.select(slice(row, row + 1)).inputs
        following = {"states": inputs["next.states"]}
        actions, log_prob = modules["policy"](following, inputs["next_noise"])
        first, second = modules["target_critic"](following, actions)[:, 0].tolist()
        value = min(first, second) - alpha * log_prob.item()
        target = batch.rewards[row].item() + inputs["discounts"].item() * value
        for q in modules["critic"](inputs, inputs["raw_actions"])[:, 0].tolist():
            critic += (q - target) ** 2 / 2 / len(batch)
        actions, log_prob = modules["policy"](inputs, inputs["noise"])
        q = min(modules["critic"](inputs, actions)[:, 0].tolist())
        policy += (alpha * log_prob.item() - q) / len(batch)
        temperature += -alpha * (log_prob.item() - 1.5) / len(batch)
    found = [each.of(modules, batch, len(batch))[0].item() for each in algorithm.losses()]
    assert found == pytest.approx([critic, policy, temperature], rel=1e-4)


def test_targets_begin_equal_and_a_fixed_temperature_has_no_loss() -> None:
    algorithm = sac(learn_temperature=False)
    modules = networks(algorithm)
    pairs = zip(modules["critic"].parameters(), modules["target_critic"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert [each.name for each in algorithm.losses()] == ["critic", "policy"]
