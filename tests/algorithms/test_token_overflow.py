"""Log-ratios of any size, and batches without tokens: every number stays finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.algorithms.losses import clipped_policy_loss, clipped_value_loss
from rlinf.algorithms.protocol import Scores
from tests.algorithms.batches import EVERY_ALGORITHM, build, random_batch


@pytest.mark.parametrize("shift", [89.0, -1000.0])
@pytest.mark.parametrize("whose", ["present", "proximal"])
@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_a_far_log_ratio_leaves_loss_gradient_and_metrics_finite(
    name: str, whose: str, shift: float
) -> None:
    kind, keys = EVERY_ALGORITHM[name]
    algorithm = build(kind, **keys)
    batch, _ = algorithm.prepare(random_batch(seed=3))
    log_probs = (batch.log_probs + shift).requires_grad_()
    proximal = batch.log_probs + (shift if whose == "proximal" else 0.0)
    loss, metrics = algorithm.loss(
        Scores(log_probs, torch.zeros_like(log_probs)),
        replace(batch, proximal_log_probs=proximal, version=0),
        normalizer=algorithm.normalizer(batch),
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert bool(gradient.isfinite().all())
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_a_long_answer_does_not_cost_the_global_batch() -> None:
    """The ratio of an answer of 8192 tokens, each 0.011 nat more likely, is e^90."""
    batch = random_batch(sequences=4, length=8192, rewards=torch.tensor([1.0, 0, 0, 0]))
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    algorithm = build("rloo")
    prepared, _ = algorithm.prepare(batch)
    log_probs = batch.log_probs.clone()
    log_probs[0] += 0.011
    log_probs.requires_grad_()
    loss, _ = algorithm.loss(
        Scores(log_probs, None), prepared, normalizer=algorithm.normalizer(prepared)
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert bool(gradient.isfinite().all())
    assert not gradient[0].any()  # its advantage is positive, so its term is clipped
    assert bool(gradient[1:].any())


def test_within_the_bound_nothing_is_changed() -> None:
    algorithm = build("grpo", clip_ratio_high=1e9)
    batch = replace(random_batch(), advantages=torch.ones(8, 6))
    log_probs = batch.log_probs + 19.0
    loss, _ = algorithm.loss(Scores(log_probs, None), batch, normalizer=algorithm.normalizer(batch))
    terms, _, _ = clipped_policy_loss(
        log_ratio=log_probs - batch.log_probs,
        advantages=torch.ones(8, 6),
        clip_ratio_low=0.2,
        clip_ratio_high=1e9,
    )
    expected = (terms * batch.mask).sum() / batch.mask.sum()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "grpo"])
def test_a_batch_without_tokens_is_prepared(name: str) -> None:
    algorithm = build(name)
    batch = random_batch(length=1)
    empty = replace(
        batch,
        mask=batch.mask[:, :0],
        log_probs=batch.log_probs[:, :0],
        versions=batch.versions[:, :0],
        values=None if batch.values is None else batch.values[:, :0],
    )
    prepared, metrics = algorithm.prepare(empty)
    assert prepared.advantages is not None
    assert prepared.advantages.shape == (8, 0)
    assert metrics["rollout/trained_tokens"] == 0


def test_no_value_within_its_bound_counts_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    # Drawn apart, not as old + change: then old + (value − old) rounds to other numbers, too.
    old, values = 0.1 * (2 * torch.rand(2, 1000, 1, generator=generator) - 1)
    assert bool((old + (values - old) != values).any())
    targets = torch.randn(1000, 1, generator=generator)
    keys = {"old_values": old, "returns": targets, "value_clip": 0.2, "delta": 10.0}
    loss, clipped = clipped_value_loss(values=values, **keys)
    unbounded, _ = clipped_value_loss(values=values, **{**keys, "value_clip": None})
    assert clipped is not None
    assert not clipped.any()
    assert torch.equal(loss, unbounded)
    _, clipped = clipped_value_loss(values=targets + 0.0 * old, **keys)
    assert clipped is not None
    assert bool(clipped.any())
