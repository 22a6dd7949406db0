from __future__ import annotations

import math

import pytest
import torch

from rlinf.algorithms.base_config import AggregationMode
from rlinf.algorithms.losses import (
    aggregate,
    aggregation_normalizer,
    at_level,
    clipped_policy_loss,
    clipped_value_loss,
)

MODES: tuple[AggregationMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        # low 0.2, high 0.3, c 3: max(−Aρ, −A clip(ρ)), then min(·, c|A|)
        (1.0, 2.0, -2.0),
        (1.2, 2.0, -2.4),
        (1.5, 2.0, -2.6),  # clipped at 1.3
        (0.5, 2.0, -1.0),  # a fall is not clipped for a good action
        (1.0, -2.0, 2.0),
        (0.9, -2.0, 1.8),
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (2.0, -2.0, 4.0),  # a rise is not clipped for a bad action
        (5.0, -2.0, 6.0),  # … up to the dual clip c|A|
        (5.0, 0.0, 0.0),
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss, got_ratio, clipped = clipped_policy_loss(
        log_ratio=torch.tensor([math.log(ratio)]),
        advantages=torch.tensor([advantage]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=3.0,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert got_ratio.item() == pytest.approx(ratio)
    assert clipped.item() == pytest.approx(min(max(ratio, 0.8), 1.3))


def test_without_a_dual_clip_a_bad_action_is_unbounded() -> None:
    loss, _, _ = clipped_policy_loss(
        log_ratio=torch.tensor([math.log(50.0)]),
        advantages=torch.tensor([-1.0]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
    )
    assert loss.item() == pytest.approx(50.0, rel=1e-5)


def test_the_gradient_vanishes_where_the_clip_binds() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.0], requires_grad=True)
    loss, _, _ = clipped_policy_loss(
        log_ratio=log_ratio,
        advantages=torch.tensor([1.0, -1.0, 1.0]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
    )
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0.0, 0.0, -1.0]


def test_value_loss_by_hand() -> None:
    loss, clipped = clipped_value_loss(
        values=torch.tensor([[1.0], [0.0], [0.1]]),
        old_values=torch.tensor([[0.0], [0.0], [0.0]]),
        returns=torch.tensor([[1.0], [4.0], [0.3]]),
        value_clip=0.2,
        delta=2.0,
    )
    # 1: exact, but clipped to 0.2: ½·0.8²; 2: error 4 in the linear part, 2·(4 − 1); 3: ½·0.2²
    assert loss.flatten().tolist() == pytest.approx([0.32, 6.0, 0.02])
    assert clipped is not None
    assert clipped.flatten().tolist() == [True, False, False]


def test_value_loss_without_a_clip_is_half_the_square() -> None:
    values, returns = torch.randn(50, 2), torch.randn(50, 2)
    loss, clipped = clipped_value_loss(
        values=values, old_values=values, returns=returns, value_clip=None, delta=100.0
    )
    assert clipped is None
    torch.testing.assert_close(loss, 0.5 * (values - returns) ** 2)


def test_levels_sum_what_they_name() -> None:
    per_token = torch.arange(12.0).view(1, 3, 4)
    assert torch.equal(at_level(per_token, "token_level"), per_token.flatten(1))
    assert at_level(per_token, "action_level").tolist() == [[6.0, 22.0, 38.0]]
    assert at_level(per_token, "chunk_level").tolist() == [[66.0]]


def test_aggregation_by_hand() -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])

    def result(mode: AggregationMode) -> float:
        normalizer = aggregation_normalizer(mode=mode, mask=mask)
        return aggregate(loss=loss, mode=mode, normalizer=normalizer, mask=mask).item()

    assert result("token-mean") == pytest.approx((1 + 2 + 4) / 3)
    assert result("seq-mean-token-sum") == pytest.approx((3 + 4) / 2)
    assert result("seq-mean-token-mean") == pytest.approx((1.5 + 4) / 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [1, 3, 5, 16])
def test_the_sum_over_micro_batches_does_not_depend_on_the_split(
    mode: AggregationMode, micro: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    loss = torch.randn(16, 7, generator=generator, dtype=torch.float64)
    mask = (torch.rand(16, 7, generator=generator) < 0.4).double()
    weights = torch.rand(16, generator=generator, dtype=torch.float64)
    normalizer = aggregation_normalizer(mode=mode, mask=mask, weights=weights)
    whole = aggregate(loss=loss, mode=mode, normalizer=normalizer, mask=mask, weights=weights)
    pieces = [
        aggregate(loss=part, mode=mode, normalizer=normalizer, mask=m, weights=w)
        for part, m, w in zip(
            loss.split(micro), mask.split(micro), weights.split(micro), strict=True
        )
    ]
    torch.testing.assert_close(torch.stack(pieces).sum(), whole, rtol=1e-12, atol=1e-12)


def test_without_a_mask_every_token_counts() -> None:
    loss = torch.randn(4, 5)
    for mode in MODES:
        mask = torch.ones(4, 5)
        normalizer = aggregation_normalizer(mode=mode, mask=mask)
        torch.testing.assert_close(
            aggregate(loss=loss, mode=mode, normalizer=normalizer),
            aggregate(loss=loss, mode=mode, normalizer=normalizer, mask=mask),
        )
