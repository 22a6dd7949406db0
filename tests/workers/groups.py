"""Groups of answers as generation hands them on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf.data.sequences import Completion, PromptGroup, Score


def scored_group(draw: int, versions: Sequence[Sequence[int]]) -> PromptGroup:
    """One of answers to a prompt of two tokens, by the versions of the weights of their tokens."""
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
