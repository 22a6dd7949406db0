"""What training workers read from their streams."""

from __future__ import annotations

import torch

from rlinf.workers.training_ranks import token_batch, without_old_tokens
from tests.workers.groups import scored_group


def test_old_tokens_do_not_count_and_padding_is_no_token() -> None:
    batch = token_batch(
        [scored_group(0, [[2, 2, 4, 5]]), scored_group(1, [[3, 5]])], pad_id=0, version=5
    )
    young, masked = without_old_tokens(batch, 2)
    assert masked == 2
    assert young.mask.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert torch.equal(young.inputs["input_ids"], batch.inputs["input_ids"])
    same, none = without_old_tokens(batch, 3)
    assert none == 0
    assert torch.equal(same.mask, batch.mask)
