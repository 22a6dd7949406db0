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


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = train_tokenizer(["0123456789=+"], tmp_path)
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda model: found)
    return found


def completion(tokenizer: Any, *parts: str) -> Completion:
    """What the model said and what a tool replied, in turn."""
    tokens = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    sampled = [np.full(len(part), number % 2 == 0) for number, part in enumerate(tokens)]
    count = sum(map(len, tokens))
    return Completion(
        tokens=np.concatenate(tokens).astype(np.int64),
        log_probs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        stop_reason="stop",
        seed=0,
        sampled=np.concatenate(sampled) if len(parts) > 1 else None,
    )


def rewards(
    tokenizer: Any, section: dict[str, Any], path: Path, *completions: Completion
) -> list[float]:
    """What a function gives for the answers to a prompt."""
    group = PromptGroup(
        prompt_id=0,
        draw=0,
        prompt_tokens=np.array(tokenizer.encode("1+2")),
        answer="3",
        completions=completions,
    )
    reward = RewardConfig.model_validate({"processes": 1, "functions": {"answer": section}})
    worker: Any = object.__new__(RewardWorker)
    worker._reward, worker._model = reward, LanguageModelConfig(path=path)
    worker._pool = None
    worker.start()
    try:
        (scored,) = worker.score(Stream(group))
    finally:
        worker.close()
    return [score.reward for score in scored.payload.scores]


def test_an_answer_that_a_tool_gave_earns_nothing(tokenizer: Any, tmp_path: Path) -> None:
    given = completion(tokenizer, "1+2", "<answer>3</answer>", "=3")
    own = completion(tokenizer, "1+2", "<answer>3</answer>", "<answer>3</answer>")
    section = {"type": "exact_match"}
    assert rewards(tokenizer, section, tmp_path, given, own) == [0.0, 1.0]


def test_a_function_sees_what_each_call_said_and_was_given(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def calls(sample, expected):\n"
        "    found = [list(call) for call in sample.calls]\n"
        "    return float(found == expected[sample.completion])\n"
    )
    expected = {"1+2=3=": [["1+2", "=3"], ["=3", "=4"]], "3": []}
    section = {
        "type": "function",
        "function": f"{tmp_path}/mine.py:calls",
        "options": {"expected": expected},
    }
    several = completion(tokenizer, "1+2", "=3", "=3", "=4", "=")
    found = rewards(tokenizer, section, tmp_path, several, completion(tokenizer, "3"))
    assert found == [1.0, 1.0]
