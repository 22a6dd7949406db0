"""What a reward worker hands to the reward functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf.data.sequences import Completion, PromptGroup
from rlinf.data.tokenizer import train_tokenizer
from rlinf.flow.stream import Item
from rlinf.models.language_config import LanguageModelConfig
from rlinf.rewards.config import RewardConfig
from rlinf.workers import reward as worker_module
from rlinf.workers.reward import RewardWorker


class Stream:
    """One group, and no more."""

    def __init__(self, group: PromptGroup) -> None:
        self._items = iter([Item(0, 0, group)])

    def __iter__(self) -> Iterator[Item]:
        return self._items

    def ready(self) -> bool:
        return False


def test_an_answer_that_a_tool_gave_earns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["0123456789=+"], tmp_path)
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda model: tokenizer)
    said, reply, last = (
        np.array(tokenizer.encode(text, add_special_tokens=False))
        for text in ("1+2", "<answer>3</answer>", "=3")
    )
    own = np.array(tokenizer.encode("<answer>3</answer>", add_special_tokens=False))

    def completion(end: np.ndarray) -> Completion:
        begun = Completion(
            tokens=said,
            log_probs=np.zeros(len(said), np.float32),
            versions=np.zeros(len(said), np.int64),
            stop_reason="stop",
            seed=0,
        ).followed_by(reply)
        count = len(end)
        return Completion(
            tokens=np.concatenate([begun.tokens, end]),
            log_probs=np.concatenate([begun.log_probs, np.zeros(count, np.float32)]),
            versions=np.concatenate([begun.versions, np.zeros(count, np.int64)]),
            stop_reason="stop",
            seed=0,
            sampled=np.concatenate([begun.mask, np.ones(count, np.bool_)]),
        )

    group = PromptGroup(
        prompt_id=0,
        draw=0,
        prompt_tokens=said,
        answer="3",
        completions=(completion(last), completion(own)),
    )
    reward = RewardConfig.model_validate(
        {"processes": 1, "functions": {"answer": {"type": "exact_match"}}}
    )
    worker: Any = object.__new__(RewardWorker)
    worker._reward, worker._model = reward, LanguageModelConfig(path=tmp_path)
    worker._pool = None
    worker.start()
    try:
        (scored,) = worker.score(Stream(group))
    finally:
        worker.close()
    assert [score.reward for score in scored.payload.scores] == [0.0, 1.0]
