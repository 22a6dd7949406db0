"""Attention over rows of unequal lengths equals attention of each row alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlinf.engines.ragged_attention import DecodePlan, plan_block, plan_segments, ragged_attention
from rlinf.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [3, 60, 7, 7], [200] * 9 + [4] * 20 + [90]])
@pytest.mark.parametrize("values", [8, 5])
def test_rows_attend_to_what_they_have(values: int, lengths: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, rows = len(lengths), len(lengths) + 3
    query = torch.randn(n, 4, 1, 8, dtype=dtype)
    key, value = (torch.randn(rows, 2, 256, size, dtype=dtype) for size in (8, values))
    gather = torch.randperm(rows)[:n]
    for plan, place in (
        (plan_segments(np.array(lengths), dtype=dtype, device=CPU), torch.arange(n)),
        (plan_block(gather, np.array(lengths), 256, dtype=dtype, device=CPU), gather),
    ):
        found, _ = ragged_attention(None, query, key, value, None, scaling=0.3, plan=plan)
        assert found.shape == (n, 1, 4, values)
        for row, length in enumerate(lengths):
            alone = functional.scaled_dot_product_attention(
                query[row],
                key[place[row], :, :length].repeat_interleave(2, 0),
                value[place[row], :, :length].repeat_interleave(2, 0),
                scale=0.3,
            )
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(found[row, 0], alone[:, 0], atol=tolerance)


def test_prompts_are_causal() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    whole, _ = ragged_attention(None, query, key, key, None, scaling=0.3)
    part, _ = ragged_attention(
        None, query[:, :, :4], key[:, :, :4], key[:, :, :4], None, scaling=0.3
    )
    assert torch.allclose(whole[:, :4], part, atol=1e-6)


def _cells(plan: DecodePlan) -> int:
    return sum((part.rows.stop - part.rows.start) * part.window for part in plan.segments)


def test_a_long_row_does_not_widen_the_window_of_all() -> None:
    lengths = np.array([900, *[30] * 127])
    plan = plan_segments(lengths, dtype=torch.float32, device=CPU)
    assert _cells(plan) < 0.15 * 128 * 900
    covered = [row for part in plan.segments for row in range(part.rows.start, part.rows.stop)]
    assert covered == list(range(128))
    even = plan_segments(np.full(128, 30), dtype=torch.float32, device=CPU)
    assert len(even.segments) == 1


def test_what_is_not_computed_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match=r"uses softcap.*engine `vllm`"):
        ragged_attention(SimpleNamespace(), tensor, tensor, tensor, None, scaling=1.0, softcap=50.0)
