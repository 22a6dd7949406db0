"""Prompts in memory: immutable, numbered and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlinf.data.prompts.report import LoadingReport


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt.

    Args:
        prompt_id: Its number in the data set, from 0.
        text: What was tokenised, chat template included.
        tokens: [P] int64, unpadded, read-only.
        answer: What the reward is given.
        level: Level of difficulty, or None.
    """

    prompt_id: int
    text: str
    tokens: np.ndarray
    answer: Any
    level: int | None = None

    def __post_init__(self) -> None:
        self.tokens.flags.writeable = False


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts in the order of their numbers.

    Args:
        prompts: The prompts; number i stands at i.
        report: What was left out on loading.
    """

    prompts: tuple[Prompt, ...]
    report: LoadingReport

    def __post_init__(self) -> None:
        if any(prompt.prompt_id != i for i, prompt in enumerate(self.prompts)):
            raise ValueError("the prompts of a data set are numbered from 0 in their order")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, prompt_id: int) -> Prompt:
        return self.prompts[prompt_id]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    @cached_property
    def sha256(self) -> str:
        """SHA-256, in hex, of texts, tokens, answers and levels: equal contents, equal hash."""
        digest = hashlib.sha256(b"rlinf-prompts/1\n")
        for prompt in self.prompts:
            content = [prompt.text, prompt.tokens.tolist(), prompt.answer, prompt.level]
            line = json.dumps(content, sort_keys=True, separators=(",", ":"), default=repr)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()


@dataclass(frozen=True)
class PromptSets:
    """What a run trains on, and what it is evaluated on.

    Args:
        train: Prompts to train on.
        validation: Other prompts; None where none are configured.
    """

    train: PromptDataset
    validation: PromptDataset | None

    @property
    def shared(self) -> int:
        """Validation prompts whose text is also trained on: their scores show no generality."""
        texts = {prompt.text for prompt in self.train}
        return sum(prompt.text in texts for prompt in self.validation or ())
