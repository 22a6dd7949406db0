"""What training workers read from their streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.algorithms.base_config import REGISTRY
from rlinf.data.sequences import Score
from rlinf.workers.config.answering import PartialRolloutConfig
from rlinf.workers.training_ranks import (
    count_no_old_tokens,
    old_tokens,
    token_batch,
    without_old_tokens,
)
from tests.workers.groups import scored_group


def test_old_tokens_do_not_count_and_padding_is_no_token() -> None:
    batch = token_batch(
        [scored_group(0, [[2, 2, 4, 5]]), scored_group(1, [[3, 5]])], pad_id=0, version=5
    )
    young = without_old_tokens(batch, 2)
    assert old_tokens(batch, 2) == 2
    assert young.mask.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert torch.equal(young.inputs["input_ids"], batch.inputs["input_ids"])
    assert old_tokens(batch, 3) == 0
    assert torch.equal(without_old_tokens(batch, 3).mask, batch.mask)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "reinforce_pp"])
def test_advantages_are_normalised_over_the_tokens_that_are_not_too_old(kind: str) -> None:
    groups = [
        replace(
            scored_group(n, [[2, 2, 4, 5], [5, 5, 5]]),
            scores=(Score(reward=float(n)), Score(reward=1.0)),
        )
        for n in range(3)
    ]
    batch = token_batch(groups, pad_id=0, version=5)
    batch = replace(batch, values=torch.zeros_like(batch.mask))
    algorithm = REGISTRY.load(kind)(normalize_advantages=True).build(family="tokens", group_size=2)
    partial = PartialRolloutConfig(max_token_staleness=2, too_old="mask")
    assert count_no_old_tokens(algorithm, partial) == 2
    prepared, metrics = algorithm.prepare(batch)
    young = without_old_tokens(batch, 2).mask
    assert torch.equal(prepared.mask, young)
    assert metrics["rollout/trained_tokens"] == float(young.sum())
    counted = prepared.advantages[young > 0]
    assert counted.mean().abs() < 1e-5
    assert (counted.std(correction=0) - 1).abs() < 0.1
