import math

import pytest
import torch

from rlinf.trainers.ranks import sum_ranks, tree_sum


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 16])
def test_sum_is_the_sum(leaves):
    values = torch.randn(leaves, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = tree_sum(0, leaves, lambda i: values[i].clone())
    expected = torch.tensor(
        [math.fsum(column) for column in values.T.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(total, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_power_of_two_of_ranks_gives_the_same_bits(ranks):
    values = torch.randn(16, 1000, generator=torch.Generator().manual_seed(1))

    def leaf(index: int) -> torch.Tensor:
        return values[index].clone()

    size = 16 // ranks
    parts = [tree_sum(first, first + size, leaf) for first in range(0, 16, size)]
    assert torch.equal(sum_ranks(parts), tree_sum(0, 16, leaf))


def test_a_plain_running_sum_would_not_give_the_same_bits():
    values = torch.randn(16, 1000, generator=torch.Generator().manual_seed(1))
    running = values[0].clone()
    for value in values[1:]:
        running += value
    assert not torch.equal(running, tree_sum(0, 16, lambda i: values[i].clone()))
