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
    """One sampled answer; with tools, what they replied stands between its turns.

    Args:
        tokens: [L] int64, the end token included where one was sampled.
        log_probs: [L] float32 of each token under the distribution that it was sampled from; 0 for
            one that was given.
        versions: [L] int64, version of the weights that sampled each token; a given one has that
            of the token before it.
        stop_reason: Why it ended.
        seed: Seed of its sampling; with the weights and what was given it determines the tokens.
        sampled: [L] bool, False for tokens that were given and not sampled; None: all were sampled.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    stop_reason: StopReason
    seed: int
    sampled: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it off."""
        return self.stop_reason == "length"

    @property
    def mask(self) -> np.ndarray:
        """[L] bool, True for the tokens that were sampled."""
        return np.ones(len(self), np.bool_) if self.sampled is None else self.sampled

    @property
    def sampled_tokens(self) -> np.ndarray:
        """What the model itself said: the tokens without those that were given."""
        return self.tokens if self.sampled is None else self.tokens[self.sampled]

    @property
    def turn_start(self) -> int:
        """Where the last turn begins: behind the last token that was given."""
        given = np.flatnonzero(~self.mask)
        return int(given[-1]) + 1 if len(given) else 0

    @property
    def turns(self) -> int:
        """Turns that were sampled, the last one included; 1 without given tokens."""
        return 1 if self.sampled is None else 1 + int((np.diff(self.sampled.astype(int)) < 0).sum())

    def ended(self, reason: StopReason) -> Completion:
        """The same tokens, ended for another reason."""
        return replace(self, stop_reason=reason)

    def followed_by(self, given: np.ndarray) -> Completion:
        """The completion with given tokens behind it, to be continued.

        Args:
            given: [m] int64 tokens that were not sampled, m >= 1.

        Raises:
            ValueError: Nothing was sampled yet; such tokens are part of the prompt.
        """
        if not len(self):
            raise ValueError("given tokens before the first sampled one belong to the prompt")
        count = len(given)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, given.astype(np.int64)]),
            log_probs=np.concatenate([self.log_probs, np.zeros(count, np.float32)]),
            # No newer weights have read them, which is what an engine asks.
            versions=np.concatenate([self.versions, np.repeat(self.versions[-1:], count)]),
            stop_reason="abort",
            sampled=np.concatenate([self.mask, np.zeros(count, np.bool_)]),
        )


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
