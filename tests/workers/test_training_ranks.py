"""What training workers read from their streams."""

from __future__ import annotations

import numpy as np
import torch

from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.workers.training_ranks import token_batch, without_old_tokens


def group(draw: int, *versions: list[int]) -> PromptGroup:
    completions = tuple(
        Completion(
            tokens=np.arange(len(found)) + 3,
            log_probs=np.zeros(len(found), np.float32),
            versions=np.array(found, np.int64),
            stop_reason="stop",
            seed=0,
        )
        for found in versions
    )
    return PromptGroup(
        prompt_id=draw,
        draw=draw,
        prompt_tokens=np.array([1, 2]),
        answer=None,
        completions=completions,
        scores=tuple(Score(reward=1.0) for _ in completions),
    )


def test_old_tokens_do_not_count_and_padding_is_no_token() -> None:
    batch = token_batch([group(0, [2, 2, 4, 5]), group(1, [3, 5])], pad_id=0, version=5)
    young, masked = without_old_tokens(batch, 2)
    assert masked == 2
    assert young.mask.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert torch.equal(young.inputs["input_ids"], batch.inputs["input_ids"])
    same, none = without_old_tokens(batch, 3)
    assert none == 0
    assert torch.equal(same.mask, batch.mask)
