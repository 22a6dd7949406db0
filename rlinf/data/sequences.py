"""Generated text as it travels from rollout to training: completions and prompt groups.

A group, all completions of one prompt, is the atomic unit: advantages compare its members. Token
arrays are never changed after they were made; what is learnt later (rewards) makes a new object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

StopReason = Literal["stop", "length", "abort"]
"""``stop``: an end token or stop string; ``length``: the token limit; ``abort``: interrupted."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer.

    Args:
        tokens: [L] int64, the end token included where one was sampled.
        log_probs: [L] float32 of each token under the distribution that it was sampled from.
        versions: [L] int64, version of the weights that sampled each token.
        stop_reason: Why it ended.
        seed: Seed of its sampling; with the weights it determines the tokens.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    stop_reason: StopReason
    seed: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it off."""
        return self.stop_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a completion is worth.

    Args:
        reward: Weighted sum of the parts.
        parts: Value of each reward function by name, before weighting.
        valid: False where a reward function raised or ran out of time: the completion is not
            trained on.
        reason: Why it is not valid.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    valid: bool = True
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt with the completions that were sampled for it.

    Args:
        prompt_id: Number of the prompt in its data set.
        draw: How many prompts the run had drawn before this one; orders groups and seeds them.
        prompt_tokens: [P] int64, unpadded.
        answer: Reference of the reward, as the data set gives it.
        completions: G completions in the order of their seeds.
        scores: G scores, or None before the reward stage.
    """

    prompt_id: int
    draw: int
    prompt_tokens: np.ndarray
    answer: Any
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...] | None = None

    def scored(self, scores: tuple[Score, ...]) -> PromptGroup:
        """The same group with its rewards.

        Raises:
            ValueError: There is not one score for each completion.
        """
        if len(scores) != len(self.completions):
            raise ValueError(f"{len(scores)} scores for {len(self.completions)} completions")
        return replace(self, scores=scores)

    @property
    def rewards(self) -> np.ndarray:
        """[G] float32 rewards.

        Raises:
            ValueError: The group has not been scored.
        """
        if self.scores is None:
            raise ValueError(f"the group of prompt {self.prompt_id} has no scores yet")
        return np.array([score.reward for score in self.scores], np.float32)
