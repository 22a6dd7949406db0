from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlinf.algorithms.base_config import REGISTRY
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.samples import critic_metrics
from rlinf.errors import ConfigError
from tests.algorithms.rollouts import flags, random_trajectory


@dataclass(frozen=True)
class Outcome:
    log_probs: torch.Tensor
    values: torch.Tensor
    entropy: torch.Tensor


def random_batch(samples: int = 24, chunk: int = 2, value_dim: int = 1) -> Batch:
    trajectory = random_trajectory(
        steps=samples // 4, chunk=chunk, action_dim=3, value_dim=value_dim, seed=5
    )
    level = "action_level" if value_dim > 1 else "chunk_level"
    config = PPOConfig(
        reward_type="action_level" if value_dim > 1 else "chunk_level", logprob_type=level
    )
    return config.build(family="actions").prepare(trajectory)[0]


def random_evaluation(batch: Batch, chunk: int = 2, seed: int = 3) -> Outcome:
    """Log-probs near the old ones, which the batch holds summed over the chunk."""
    generator = torch.Generator().manual_seed(seed)
    samples = len(batch)
    noise = 0.3 * torch.randn(samples, chunk, 3, generator=generator)
    assert batch.values is not None
    return Outcome(
        log_probs=(batch.log_probs.sum(-1) / (3 * chunk)).view(-1, 1, 1) + noise,
        values=batch.values + torch.randn(samples, batch.values.shape[1], generator=generator),
        entropy=torch.rand(samples, chunk, 3, generator=generator),
    )


def reference_loss(
    config: PPOConfig, batch: Batch, outcome: Outcome, weights: np.ndarray
) -> tuple[float, float, float]:
    """Policy, value and entropy loss sample by sample, written from the papers."""
    policy = value = entropy = 0.0
    assert batch.values is not None
    assert batch.returns is not None
    for i in range(len(batch)):
        log_ratio = float(outcome.log_probs[i].double().sum() - batch.log_probs[i].double().sum())
        ratio, advantage = np.exp(log_ratio), float(batch.advantages[i])
        bounded = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
        objective = min(ratio * advantage, bounded * advantage)
        if config.clip_ratio_c is not None and advantage < 0:
            objective = max(objective, config.clip_ratio_c * advantage)
        policy -= weights[i] * objective
        entropy += weights[i] * float(outcome.entropy[i].double().sum())
        v, old, ret = float(outcome.values[i]), float(batch.values[i]), float(batch.returns[i])
        errors = [v - ret]
        if config.value_clip is not None:
            errors.append(old + min(max(v - old, -config.value_clip), config.value_clip) - ret)
        delta = config.huber_delta
        value += weights[i] * max(
            0.5 * e * e if abs(e) < delta else delta * (abs(e) - 0.5 * delta) for e in errors
        )
    total = float(weights.sum())
    return policy / total, value / total, entropy / total


SUM = "seq-mean-token-sum"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_ratio_c": 1.5, "clip_ratio_high": 0.28},
        {"value_clip": None, "huber_delta": 0.5, "value_coefficient": 0.5},
        {"entropy_bonus": 0.02, "entropy_type": "action_level", "loss_agg_func": SUM},
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_against_a_sample_by_sample_reference(options: dict[str, Any], weighted: bool) -> None:
    config = PPOConfig(**options).of_family("actions")
    batch = random_batch()
    weights = np.random.default_rng(0).random(len(batch)) if weighted else np.ones(len(batch))
    if weighted:
        weights[3] = 0.0
        batch = replace(batch, weights=torch.tensor(weights, dtype=torch.float32))
    outcome = random_evaluation(batch)
    algorithm = config.build(family="actions")
    loss, metrics = algorithm.loss(outcome, batch, normalizer=algorithm.normalizer(batch))
    policy, value, entropy = reference_loss(config, batch, outcome, weights)
    assert metrics["actor/policy_loss"].item() == pytest.approx(policy, rel=1e-5, abs=1e-6)
    if config.clip_ratio_c is None:
        assert "actor/dual_clip_fraction" not in metrics
    else:
        log_ratios = outcome.log_probs.sum(dim=(1, 2)) - batch.log_probs.sum(dim=1)
        above = log_ratios.exp().numpy() > config.clip_ratio_c
        bound = above & (batch.advantages.numpy()[:, 0] < 0)
        expected_share = np.average(bound, weights=weights)
        assert 0 < expected_share < 1
        assert metrics["actor/dual_clip_fraction"].item() == pytest.approx(expected_share, rel=1e-5)
    assert metrics["critic/value_loss"].item() == pytest.approx(value, rel=1e-5)
    assert metrics["actor/entropy_loss"].item() == pytest.approx(entropy, rel=1e-5)
    expected = policy + config.value_coefficient * value - config.entropy_bonus * entropy
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_metrics_of_the_ratio() -> None:
    batch = random_batch()
    outcome = random_evaluation(batch)
    _, metrics = PPOConfig().build(family="actions").loss(outcome, batch, normalizer=len(batch))
    log_ratio = (outcome.log_probs.sum((1, 2)) - batch.log_probs[:, 0]).double().numpy()
    ratio = np.exp(log_ratio)
    expected = {
        "actor/ratio": ratio.mean(),
        "actor/clipped_ratio": ratio.clip(0.8, 1.2).mean(),
        "actor/clip_fraction": ((ratio < 0.8) | (ratio > 1.2)).mean(),
        "actor/approx_kl": (ratio - 1 - log_ratio).mean(),
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("micro", [1, 5, 8, 24])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("level", "mode"),
    [
        ("chunk_level", "token-mean"),
        *itertools.product(("token_level", "action_level"),
                           ("token-mean", SUM, "seq-mean-token-mean")),
    ],
)  # fmt: skip
def test_gradient_and_metrics_do_not_depend_on_the_micro_split(
    micro: int, weighted: bool, mode: str, level: str
) -> None:
    config = PPOConfig(
        loss_agg_func=mode,
        logprob_type=level,
        entropy_type=level,
        entropy_bonus=0.1,
        clip_ratio_c=3.0,
    )
    algorithm = config.build(family="actions")
    trajectory = random_trajectory(chunk=2, action_dim=3, seed=5)
    batch, _ = algorithm.prepare(trajectory)
    if weighted:
        weights = torch.rand(len(batch), generator=torch.Generator().manual_seed(0))
        weights[:9] = 0.0
        batch = replace(batch, weights=weights)
    shift = torch.tensor([0.1, -0.2, 0.3], requires_grad=True)
    old = trajectory.log_probs.flatten(0, 1)
    normalizer = algorithm.normalizer(batch)

    def run(size: int) -> tuple[torch.Tensor, dict[str, float]]:
        gradient, total = torch.zeros(3), dict[str, float]()
        for part, log_probs in zip(batch.split(size), old.split(size), strict=True):
            assert part.values is not None
            outcome = Outcome(
                log_probs=log_probs + shift,
                values=part.values + shift.sum(),
                entropy=shift.square().expand_as(log_probs),
            )
            loss, metrics = algorithm.loss(outcome, part, normalizer=normalizer)
            gradient = gradient + torch.autograd.grad(loss, shift)[0]
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value.item()
        return gradient, total

    whole, whole_metrics = run(len(batch))
    parts, parts_metrics = run(micro)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


def test_reference_divergence_enters_the_loss() -> None:
    config = PPOConfig(kl_beta=0.5, kl_penalty_type="k2")
    algorithm = config.build(family="actions")
    assert algorithm.needs_reference
    batch = random_batch()
    outcome = random_evaluation(batch)
    with pytest.raises(ValueError, match="reference_log_probs"):
        algorithm.loss(outcome, batch, normalizer=24)
    reference = outcome.log_probs.sum((1, 2)).unsqueeze(-1) - 0.2
    batch = replace(batch, reference_log_probs=reference)
    loss, metrics = algorithm.loss(outcome, batch, normalizer=24)
    plain, _ = PPOConfig().build(family="actions").loss(outcome, batch, normalizer=24)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.02, rel=1e-4)
    assert (loss - plain).item() == pytest.approx(0.01, rel=1e-3)


def test_prepared_advantages_are_normal_and_returns_are_not() -> None:
    trajectory = random_trajectory(steps=32, truncations=flags(32, 4, [(9, 1), (20, 2)]))
    batch, metrics = PPOConfig().build(family="actions").prepare(trajectory)
    raw, _ = PPOConfig(normalize_advantages=False).build(family="actions").prepare(trajectory)
    assert batch.advantages.shape == (128, 1)
    assert batch.advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert batch.advantages.std().item() == pytest.approx(1.0, rel=1e-4)
    assert batch.returns is not None
    assert batch.values is not None
    torch.testing.assert_close(batch.returns, raw.advantages + batch.values)
    assert metrics["rollout/rewards"] == pytest.approx(trajectory.rewards.mean().item())
    assert metrics["rollout/advantages_max"] == batch.advantages.max().item()
    assert batch.weights is None


def test_spoilt_rows_are_not_trained_on() -> None:
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[4, 2] = False
    rewards = torch.randn(6, 4, 1)
    rewards[4, 2] = torch.nan
    trajectory = random_trajectory(valid=valid, rewards=rewards, truncations=flags(6, 4, [(1, 2)]))
    batch, metrics = PPOConfig(normalize_rewards=True).build(family="actions").prepare(trajectory)
    # Rows 2 to 4 of environment 2 are the spoilt episode.
    assert len(batch) == 6 * 4 - 3
    assert bool(batch.advantages.isfinite().all())
    assert all(np.isfinite(value) for value in metrics.values())
    states = trajectory.forward_inputs["states"]
    assert not any(torch.equal(row, states[3, 2]) for row in batch.inputs["states"])


def test_idle_rows_have_no_weight_and_environments_equal_shares() -> None:
    trajectory = random_trajectory(auto_reset=False, terminations=flags(6, 4, [(2, 0)]))
    batch, metrics = PPOConfig().build(family="actions").prepare(trajectory)
    assert batch.weights is not None
    running = batch.weights > 0
    assert metrics["rollout/rewards"] == pytest.approx(batch.rewards[running].mean().item())
    advantages = batch.advantages[running]
    assert metrics["rollout/advantages_mean"] == pytest.approx(advantages.mean().item(), abs=1e-6)
    assert metrics["rollout/advantages_min"] == advantages.min().item()
    assert batch.returns is not None
    assert batch.values is not None
    returns, values = batch.returns[running], batch.values[running]
    explained = 1 - (returns - values).var().item() / returns.var().item()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-4)
    by_env = batch.weights.view(6, 4)
    assert by_env[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    assert by_env.sum(0).tolist() == [6.0] * 4
    plain, _ = PPOConfig(weight_by_episode_length=False).build(family="actions").prepare(trajectory)
    assert plain.weights is not None
    assert plain.weights.view(6, 4)[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("value_dim", [1, 2])
def test_one_update_follows_the_advantage(value_dim: int) -> None:
    """The gradient of the loss at ratio 1 is the policy gradient −A ∇log π / N."""
    batch = random_batch(value_dim=value_dim)
    level = "action_level" if value_dim > 1 else "chunk_level"
    config = PPOConfig(
        reward_type="action_level" if value_dim > 1 else "chunk_level", logprob_type=level
    )
    outcome = random_evaluation(batch)
    shape = outcome.log_probs.shape
    old = batch.log_probs.view(len(batch), -1, 1).expand(-1, -1, 3)
    log_probs = (old / (3 if value_dim > 1 else 6)).expand(shape).clone().requires_grad_()
    algorithm = config.build(family="actions")
    loss, _ = algorithm.loss(
        replace(outcome, log_probs=log_probs), batch, normalizer=algorithm.normalizer(batch)
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    expected = -batch.advantages.unsqueeze(-1).expand(shape) / (len(batch) * value_dim)
    torch.testing.assert_close(gradient, expected)


def test_state_restores_the_reward_statistics() -> None:
    config = PPOConfig(normalize_rewards=True)
    algorithm, restored = config.build(family="actions"), config.build(family="actions")
    algorithm.prepare(random_trajectory(seed=1))
    restored.load_state_dict(algorithm.state_dict())
    following = random_trajectory(seed=2)
    ours, theirs = algorithm.prepare(following)[0], restored.prepare(following)[0]
    assert ours.returns is not None
    assert theirs.returns is not None
    assert torch.equal(ours.returns, theirs.returns)
    assert PPOConfig().build(family="actions").state_dict() == {}


@pytest.mark.parametrize("told", [True, False])
def test_the_scale_of_a_task_says_nothing_where_tasks_are_told(told: bool) -> None:
    plain = random_trajectory(chunk=2, value_dim=2)
    tasks = torch.tensor([0, 0, 1, 1]).expand(6, 4)
    inputs = {**plain.forward_inputs, **({"task_ids": tasks} if told else {})}
    larger = plain.rewards * torch.where(tasks == 1, 1000.0, 1.0).unsqueeze(-1)
    config = PPOConfig(
        normalize_rewards=True, reward_type="action_level", logprob_type="action_level"
    )
    returns = []
    for rewards in (plain.rewards, larger):
        trajectory = replace(plain, forward_inputs=inputs, rewards=rewards)
        returns.append(config.build(family="actions").prepare(trajectory)[0].returns)
    assert torch.allclose(*returns, rtol=1e-4) is told


def test_explained_variance_of_perfect_and_useless_critics() -> None:
    batch = random_batch()
    assert batch.returns is not None
    columns = {
        1.0: {"values": batch.returns},
        0.0: {"values": torch.zeros_like(batch.returns)},
    }
    for expected, column in columns.items():
        found = critic_metrics(replace(batch, **column))
        assert found["critic/explained_variance"] == pytest.approx(expected)
    constant = replace(batch, returns=torch.ones_like(batch.returns))
    assert critic_metrics(constant) == {"critic/explained_variance": 0.0}
    assert critic_metrics(replace(batch, returns=None)) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "less than or equal to 1"),
        ({"gae_lamda": 0.9}, "Extra inputs"),
        ({"clip_ratio_c": 1.1}, "nearest: 1.2, or null"),
        ({"reward_type": "action_level"}, "nearest: action_level"),
        ({"loss_agg_func": "mean"}, "token-mean"),
        ({"loss_agg_func": SUM}, "a row is one term; nearest: token-mean"),
        ({"loss_agg_func": "seq-mean-token-mean", "entropy_type": "token_level"}, "is one term"),
        ({"value_clip": 0.0}, "greater than 0"),
    ],
)
def test_illegal_configs_say_what_and_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PPOConfig(**options).of_family("actions")


def test_registry() -> None:
    assert {"ppo", "grpo"} <= set(REGISTRY.names())
    algorithm = REGISTRY.load("ppo")(type="ppo").build(family="actions")
    assert algorithm.config.needs_values
    assert not algorithm.config.needs_groups
    assert algorithm.value_dim(4) == 1
    assert (
        PPOConfig(reward_type="action_level", logprob_type="token_level")
        .build(family="actions")
        .value_dim(4)
        == 4
    )
    with pytest.raises(ConfigError, match="did you mean `ppo`"):
        REGISTRY.load("pppo")
