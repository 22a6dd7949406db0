from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.algorithms.credit import (
    at_last_token,
    leave_one_out_advantages,
    overlong_penalty,
    token_advantages,
    whiten,
)

MASK = torch.tensor(
    [[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
)


def test_the_reward_stands_on_the_last_valid_token_of_each_sequence() -> None:
    placed = at_last_token(rewards=torch.arange(1.0, 7.0), mask=MASK)
    assert placed.tolist() == [
        [0, 0, 0, 1],
        [0, 2, 0, 0],
        [3, 0, 0, 0],
        [0, 0, 4, 0],
        [0, 0, 0, 0],  # nothing was sampled
        [0, 0, 6, 0],
    ]


def test_advantages_against_the_sum_of_discounted_errors() -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k} over the sequence with its invalid tokens cut out."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    values = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    gamma, lam = 0.9, 0.8
    advantages, returns = token_advantages(
        rewards=rewards, values=values, mask=MASK, gamma=gamma, gae_lambda=lam
    )
    for row in range(6):
        tokens = [t for t in range(4) if MASK[row, t] > 0]
        r, v = rewards[row, tokens].numpy(), values[row, tokens].numpy()
        deltas = r + gamma * np.append(v[1:], 0.0)[: len(v)] - v
        wanted = np.zeros(4)
        for i, t in enumerate(tokens):
            wanted[t] = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:]))
        np.testing.assert_allclose(advantages[row].numpy(), wanted, atol=1e-12)
        np.testing.assert_allclose(returns[row, tokens].numpy(), wanted[tokens] + v, atol=1e-12)
        invalid = [t for t in range(4) if t not in tokens]
        assert returns[row, invalid].tolist() == [0.0] * len(invalid)


def test_leave_one_out_by_hand() -> None:
    scores = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0, 3.0])
    groups = torch.tensor([4, 9, 4, 9, 4, 1])
    advantages, sizes = leave_one_out_advantages(scores=scores, groups=groups)
    # group 4: 1 − (2+6)/2, 2 − (1+6)/2, 6 − (1+2)/2; group 9: 5 − 7, 7 − 5; group 1 is alone
    assert advantages.tolist() == pytest.approx([-3.0, -2.0, -1.5, 2.0, 4.5, 0.0])
    assert sizes.tolist() == [3, 2, 3, 2, 3, 1]


def test_whitened_tokens_have_mean_0_and_deviation_1() -> None:
    advantages = 5 + 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    result = whiten(advantages=advantages, mask=MASK)
    counted = advantages[MASK > 0].double().numpy()
    wanted = (counted - counted.mean()) / counted.std()
    np.testing.assert_allclose(result[MASK > 0].numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert result[MASK == 0].abs().sum() == 0


def test_equal_advantages_are_whitened_to_0() -> None:
    result = whiten(advantages=torch.full((6, 4), 0.1), mask=MASK)
    assert result.abs().max() < 1e-6
    assert whiten(advantages=torch.ones(2, 3), mask=torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_the_length_penalty_falls_from_0_to_minus_1() -> None:
    """L_max 20480 and L_cache 4096, the lengths of the DAPO paper."""
    lengths = torch.tensor([1.0, 16384, 16385, 18432, 20479, 20480, 30000])
    penalty = overlong_penalty(lengths=lengths, safe_length=16384, max_length=20480)
    wanted = [0.0, 0.0, -1 / 4096, -0.5, -4095 / 4096, -1.0, -1.0]
    assert penalty.tolist() == pytest.approx(wanted)
