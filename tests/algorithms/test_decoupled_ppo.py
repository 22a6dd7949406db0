"""Decoupled PPO on actions, against the formula written out sample by sample."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.algorithms.base_config import REGISTRY
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DecoupledPPOConfig, PPOConfig
from rlinf.data.trajectory import Trajectory
from rlinf.models.policy import ActionEvaluation
from tests.algorithms.rollouts import flags, random_trajectory

from .test_ppo import Outcome, random_batch, random_evaluation


def stale_batch(config: DecoupledPPOConfig, seed: int = 11) -> tuple[Batch, Outcome]:
    """Samples of weights of different ages, with log-probs of the proximal policy."""
    batch = random_batch()
    generator = torch.Generator().manual_seed(seed)
    return (
        replace(
            batch,
            proximal_log_probs=batch.log_probs + torch.randn(len(batch), 1, generator=generator),
            version=9,
            versions=9 - torch.randint(0, 4, (len(batch), 1), generator=generator),
        ),
        random_evaluation(batch),
    )


def slow_loss(
    config: DecoupledPPOConfig, batch: Batch, outcome: Outcome, weights: np.ndarray
) -> tuple[float, int]:
    """Mean of w · max(−A r, −A clip(r)), and how many samples were left out."""
    total, left_out = 0.0, 0
    assert batch.proximal_log_probs is not None
    for i in range(len(batch)):
        acted = float(batch.log_probs[i].double())
        present = float(outcome.log_probs[i].double().sum())
        if config.proximal == "recomputed":
            proximal = float(batch.proximal_log_probs[i].double())
        else:
            # v_θ is the version in the making, v_b that which acted.
            made, behaviour = 10, int(batch.versions[i])
            alpha = min(max((made - 1 - behaviour) / (made - behaviour), 0.0), 1.0)
            proximal = acted + alpha * (present - acted)
        weight = math.exp(proximal - acted)
        if weight > config.behave_weight_threshold:
            left_out += 1
            continue
        ratio, advantage = math.exp(present - proximal), float(batch.advantages[i])
        clipped = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
        loss = max(-advantage * ratio, -advantage * clipped)
        if config.clip_ratio_c is not None and advantage < 0:
            loss = min(loss, -config.clip_ratio_c * advantage)
        total += weights[i] * weight * loss
    return total / float(weights.sum()), left_out


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
@pytest.mark.parametrize("options", [{}, {"clip_ratio_c": 1.5}, {"behave_weight_threshold": 1.1}])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_against_the_formula(proximal: str, options: dict, weighted: bool) -> None:
    config = DecoupledPPOConfig(proximal=proximal, **options).of_family("actions")
    batch, outcome = stale_batch(config)
    weights = np.random.default_rng(0).random(len(batch)) if weighted else np.ones(len(batch))
    if weighted:
        batch = replace(batch, weights=torch.tensor(weights, dtype=torch.float32))
    algorithm = config.build(family="actions")
    _, metrics = algorithm.loss(outcome, batch, normalizer=algorithm.normalizer(batch))
    expected, left_out = slow_loss(config, batch, outcome, weights)
    assert metrics["actor/policy_loss"].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert left_out > 0
    if not weighted:
        share = metrics["actor/importance_clip_fraction"].item()
        assert share == pytest.approx(left_out / len(batch))


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_fresh_data_give_the_loss_of_ppo(proximal: str) -> None:
    batch = random_batch()
    outcome = random_evaluation(batch)
    fresh = replace(
        batch,
        proximal_log_probs=batch.log_probs,
        version=0,
    )
    decoupled = DecoupledPPOConfig(proximal=proximal).build(family="actions")
    loss, metrics = decoupled.loss(outcome, fresh, normalizer=24)
    plain, plain_metrics = PPOConfig().build(family="actions").loss(outcome, batch, normalizer=24)
    assert torch.equal(loss, plain)
    assert metrics["actor/proximal_ratio"] == 1
    assert {name: metrics[name] for name in plain_metrics} == plain_metrics


def test_gradient_flows_through_the_present_policy_alone() -> None:
    config = DecoupledPPOConfig(proximal="interpolated", normalize_advantages=False)
    batch, outcome = stale_batch(config)
    shift = torch.zeros((), requires_grad=True)
    moved = replace(outcome, log_probs=outcome.log_probs + shift)
    loss, _ = config.build(family="actions").loss(moved, batch, normalizer=len(batch))
    (gradient,) = torch.autograd.grad(loss, shift)
    present = batch.fold(outcome.log_probs)
    proximal = config.build(family="actions")._proximal(present, batch)
    fixed = replace(batch, proximal_log_probs=proximal)
    held = DecoupledPPOConfig(normalize_advantages=False).build(family="actions")
    loss, _ = held.loss(moved, fixed, normalizer=len(batch))
    (expected,) = torch.autograd.grad(loss, shift)
    assert gradient != 0
    torch.testing.assert_close(gradient, expected)


def test_what_is_missing_is_named() -> None:
    batch = random_batch()
    outcome = random_evaluation(batch)
    for proximal, field in (("recomputed", "proximal_log_probs"), ("interpolated", "version")):
        with pytest.raises(ValueError, match=field):
            DecoupledPPOConfig(proximal=proximal).build(family="actions").loss(
                outcome, batch, normalizer=24
            )
    assert "decoupled_ppo" in REGISTRY.names()


def rollout_with_faults() -> Trajectory:
    """Episodes that end, one that is cut, and a row that a fault spoilt."""
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[2, 1] = False
    cut = flags(6, 4, [(3, 2)])
    return random_trajectory(
        terminations=flags(6, 4, [(1, 0)]),
        truncations=cut,
        valid=valid,
        final_values=torch.where(cut, 0.7, 0.0),
    )


def test_stale_rollouts_get_the_advantages_of_the_present_critic() -> None:
    """The values after the last row and of a cut episode move with those of the row before."""
    trajectory = rollout_with_faults()
    offset = torch.arange(4.0).view(1, 4, 1)
    present = ActionEvaluation(
        log_probs=trajectory.log_probs + 0.1,
        values=trajectory.values + offset,
        entropy=torch.zeros_like(trajectory.log_probs),
    )
    batch, _ = DecoupledPPOConfig().build(family="actions").prepare_stale(trajectory, present)
    valued = replace(
        trajectory,
        values=trajectory.values + offset,
        bootstrap_values=trajectory.bootstrap_values + offset[0],
        final_values=torch.where(trajectory.truncations, 0.7 + offset, 0.0),
    )
    expected, _ = PPOConfig().build(family="actions").prepare(valued)
    torch.testing.assert_close(batch.advantages, expected.advantages)
    torch.testing.assert_close(batch.returns, expected.returns)
    assert torch.equal(batch.log_probs, expected.log_probs)
    assert batch.proximal_log_probs is not None
    torch.testing.assert_close(batch.proximal_log_probs, batch.log_probs + 0.2)
    assert len(batch) == 24 - 3


def test_rollouts_of_the_present_weights_are_those_of_ppo() -> None:
    trajectory = rollout_with_faults()
    batch, metrics = DecoupledPPOConfig().build(family="actions").prepare(trajectory)
    expected, expected_metrics = PPOConfig().build(family="actions").prepare(trajectory)
    assert metrics == expected_metrics
    assert torch.equal(batch.advantages, expected.advantages)
    assert batch.proximal_log_probs is not None
    assert torch.equal(batch.proximal_log_probs, expected.log_probs)
