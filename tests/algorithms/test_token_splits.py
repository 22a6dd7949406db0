"""Gradients do not depend on micro batches, ranks or padding."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Scores
from tests.algorithms.batches import EVERY_ALGORITHM, PROMPT, TinyModel, build, random_batch

SEQUENCES = 12
LENGTH = 6


def prepared_batch(algorithm: Algorithm, seed: int) -> Batch:
    """Log-probs of an older model, one answer without a valid reward, two cut off."""
    batch = random_batch(sequences=SEQUENCES, length=LENGTH, seed=seed)
    with torch.no_grad():
        picked = TinyModel(seed=1)(batch.inputs["input_ids"])[0]
    noise = 0.2 * torch.randn(picked.shape, generator=torch.Generator().manual_seed(seed))
    valid, truncated = batch.valid.clone(), batch.truncated.clone()
    valid[3], truncated[5], truncated[8] = False, True, True
    batch = replace(
        batch,
        log_probs=picked + noise,
        proximal_log_probs=picked,
        valid=valid,
        truncated=truncated,
    )
    return algorithm.prepare(batch)[0]


def share(algorithm: Algorithm, batch: Batch, normalizer: float) -> tuple[Tensor, dict[str, float]]:
    """Flat gradient and metrics of one micro batch under a model of its own."""
    model = TinyModel()
    log_probs, entropy, values = model(batch.inputs["input_ids"])
    loss, metrics = algorithm.loss(Scores(log_probs, entropy), batch, normalizer=normalizer)
    if algorithm.needs_values:
        value_loss, more = algorithm.value_loss(values, batch, normalizer=normalizer)
        loss, metrics = loss + value_loss, metrics | more
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    flat = [
        torch.zeros_like(p).flatten() if g is None else g.flatten()
        for p, g in zip(model.parameters(), gradients, strict=True)
    ]
    return torch.cat(flat), {name: value.item() for name, value in metrics.items()}


def total(
    algorithm: Algorithm, parts: list[Batch], normalizer: float
) -> tuple[Tensor, dict[str, float]]:
    shares = [share(algorithm, part, normalizer) for part in parts]
    names = shares[0][1]
    gradient = torch.stack([gradient for gradient, _ in shares]).sum(dim=0)
    return gradient, {name: sum(metrics[name] for _, metrics in shares) for name in names}


def trimmed(batch: Batch) -> Batch:
    """Without the padding that all of its sequences have in common."""
    length = int((batch.inputs["attention_mask"].sum(dim=1) - PROMPT).max())
    columns: dict[str, Any] = {
        "inputs": {name: ids[:, : PROMPT + length] for name, ids in batch.inputs.items()}
    }
    for field in fields(batch):
        column = getattr(batch, field.name)
        if isinstance(column, Tensor) and column.ndim == 2:
            columns[field.name] = column[:, :length]
    return replace(batch, **columns)


def check(algorithm: Algorithm, batch: Batch, parts: list[Batch]) -> None:
    normalizer = algorithm.normalizer(batch)
    whole, metrics = share(algorithm, batch, normalizer)
    split, split_metrics = total(algorithm, parts, normalizer)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
@pytest.mark.parametrize("micro_batch_size", [1, 5])
def test_any_micro_batch_size_gives_the_same_gradient(name: str, micro_batch_size: int) -> None:
    algorithm = build(EVERY_ALGORITHM[name][0], **EVERY_ALGORITHM[name][1])
    batch = prepared_batch(algorithm, seed=2)
    check(algorithm, batch, batch.split(micro_batch_size))


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_padding_does_not_change_the_gradient(name: str) -> None:
    algorithm = build(EVERY_ALGORITHM[name][0], **EVERY_ALGORITHM[name][1])
    batch = prepared_batch(algorithm, seed=3)
    check(algorithm, batch, [trimmed(part) for part in batch.split(2)])


@given(
    name=st.sampled_from(sorted(EVERY_ALGORITHM)),
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    order=st.permutations(range(SEQUENCES)),
    cuts=st.sets(st.integers(1, SEQUENCES - 1), max_size=4),
)
@settings(max_examples=40)
def test_any_distribution_over_ranks_gives_the_same_gradient(
    name: str, seed: int, ranks: int, order: list[int], cuts: set[int]
) -> None:
    """Sequences in any order on any rank, each rank's share cut into unequal micro batches."""
    algorithm = build(EVERY_ALGORITHM[name][0], **EVERY_ALGORITHM[name][1])
    batch = prepared_batch(algorithm, seed)
    parts = []
    for rank in range(ranks):
        mine = torch.tensor(order[rank::ranks])
        edges = [0, *sorted(cut for cut in cuts if cut < len(mine)), len(mine)]
        parts += [batch.select(mine[first:last]) for first, last in pairwise(edges)]
    check(algorithm, batch, parts)


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_a_global_batch_without_anything_to_train_on_has_gradient_zero(name: str) -> None:
    algorithm = build(EVERY_ALGORITHM[name][0], **EVERY_ALGORITHM[name][1])
    batch = random_batch(
        rewards=torch.full((8,), torch.nan), valid=torch.zeros(8, dtype=torch.bool)
    )
    prepared, metrics = algorithm.prepare(batch)
    assert prepared.mask.sum() == 0
    assert metrics["rollout/trained_sequences"] == 0
    gradient, loss_metrics = share(algorithm, prepared, algorithm.normalizer(prepared))
    assert gradient.abs().max() == 0
    assert all(value == 0 for value in loss_metrics.values())
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_a_micro_batch_without_valid_tokens_adds_nothing(name: str) -> None:
    """Also where its padding holds infinities, as masked logits give them."""
    algorithm = build(EVERY_ALGORITHM[name][0], **EVERY_ALGORITHM[name][1])
    batch = prepared_batch(algorithm, seed=4)
    empty = replace(batch, mask=torch.zeros_like(batch.mask)).select(slice(0, 2))
    log_probs = torch.full((2, LENGTH), -torch.inf, requires_grad=True)
    entropy = torch.full((2, LENGTH), torch.nan, requires_grad=True)
    normalizer = algorithm.normalizer(batch)
    loss, metrics = algorithm.loss(Scores(log_probs, entropy), empty, normalizer=normalizer)
    if algorithm.needs_values:
        value_loss, more = algorithm.value_loss(entropy, empty, normalizer=normalizer)
        loss, metrics = loss + value_loss, metrics | more
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == 0
    assert gradient.tolist() == torch.zeros(2, LENGTH).tolist()
    assert all(value.item() == 0 for value in metrics.values())


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_before_the_first_update_the_gradient_is_that_of_the_policy(name: str) -> None:
    """With π = π_old the gradient is −A ∇log π times the weight of the token, without a clip."""
    kind, keys = EVERY_ALGORITHM[name]
    regularised = {"kl_beta": 0.0, "entropy_bonus": 0.0, "kl_reward_beta": 0.0}
    kept = {key: value for key, value in keys.items() if not key.startswith("kl_")}
    algorithm = build(kind, **(kept | regularised))
    batch = random_batch(seed=5)
    log_probs = batch.log_probs.clone().requires_grad_()
    batch = algorithm.prepare(replace(batch, proximal_log_probs=batch.log_probs))[0]
    loss, metrics = algorithm.loss(
        Scores(log_probs, None), batch, normalizer=algorithm.normalizer(batch)
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    lengths = batch.mask.sum(dim=1, keepdim=True)
    weight = {
        "token-mean": batch.mask / batch.mask.sum(),
        "seq-mean-token-sum": batch.mask / len(batch),
        "seq-mean-token-mean": batch.mask / lengths / len(batch),
        "seq-mean-token-sum-norm": batch.mask / 10 / len(batch),
    }[algorithm.config.loss_agg_func]
    assert batch.advantages is not None
    torch.testing.assert_close(gradient, -batch.advantages * weight, rtol=1e-5, atol=1e-7)
    assert metrics["actor/ratio"].item() == pytest.approx(1.0)
    assert metrics["actor/approx_kl"].item() == pytest.approx(0.0, abs=1e-7)
    assert metrics["actor/clip_fraction"].item() == 0
