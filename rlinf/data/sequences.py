"""Generated text as it travels from rollout to training: completions, prompt groups, their rows.

A group, all completions of one prompt, is the atomic unit: advantages compare its members. Token
arrays are never changed after they were made; what is learnt later (rewards) makes a new object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlinf.data.pictures import Pictures

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

    @property
    def calls(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each turn that was followed by given tokens: its tokens, and these."""
        edges = np.flatnonzero(np.diff(self.mask)) + 1
        parts = np.split(self.tokens, edges)  # sampled and given ones in turn
        return list(zip(parts[0::2], parts[1::2], strict=False))

    def ended(self, reason: StopReason) -> Completion:
        """The same tokens, ended for another reason."""
        return replace(self, stop_reason=reason)

    def followed_by(self, given: np.ndarray) -> Completion:
        """The completion with [m] int64 given tokens behind it, m >= 1, to be continued.

        ValueError where nothing was sampled yet; such tokens are part of the prompt.
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
        pictures: Those among the tokens of the prompt.
        columns: What else the reward is given.
    """

    prompt_id: int
    draw: int
    prompt_tokens: np.ndarray
    answer: Any
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...] | None = None
    pictures: Pictures = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def scored(self, scores: tuple[Score, ...]) -> PromptGroup:
        """The same group with its rewards, one for each completion."""
        if len(scores) != len(self.completions):
            raise ValueError(f"{len(scores)} scores for {len(self.completions)} completions")
        return replace(self, scores=scores)

    @property
    def rewards(self) -> np.ndarray:
        """[G] float32 rewards; ValueError where the group has not been scored."""
        if self.scores is None:
            raise ValueError(f"the group of prompt {self.prompt_id} has no scores yet")
        return np.array([score.reward for score in self.scores], np.float32)


def assemble_sequences(groups: Sequence[PromptGroup], *, pad_id: int) -> dict[str, np.ndarray]:
    """Lay out every completion of scored groups, in their order, as N rows of S = P + L tokens.

    P is the length of the longest prompt, L that of the longest response, at least 1.

    Args:
        groups: Groups with scores and ended completions.
        pad_id: Token of the padding.

    Returns:
        input_ids: [N, S] int64, left-padded prompt | right-padded response.
        attention_mask: [N, S] bool, True where a token stands.
        mask: [N, L] float32, 1 where a token was sampled; 0 for what tools replied.
        log_probs: [N, L] float32, 0 elsewhere.
        rewards: [N] float32, 0 where not valid.
        groups: [N] int64, the draw that the sequence answers.
        versions: [N, L] int64, of the weights that sampled the token; padding repeats the last.
        truncated: [N] bool, cut off by the token limit.
        valid: [N] bool, whether the reward could be computed.

    Raises:
        ValueError: There is no group, one has no scores, or a completion was interrupted.
    """
    completions = [completion for group in groups for completion in group.completions]
    if not completions:
        raise ValueError("there is no completion to assemble")
    if any(completion.stop_reason == "abort" for completion in completions):
        raise ValueError("a completion was interrupted; continue it before training on it")
    rewards = np.concatenate([group.rewards for group in groups])
    valid = np.array([score.valid for group in groups for score in group.scores or ()])
    prompts = [group.prompt_tokens for group in groups for _ in group.completions]
    sizes, lengths = (
        np.array([len(row) for row in rows], np.int64)[:, None] for rows in (prompts, completions)
    )
    longest = int(sizes.max(initial=1))
    in_prompt = np.arange(longest) >= longest - sizes
    there = np.arange(lengths.max(initial=1)) < lengths
    last = np.array([c.versions[-1] if len(c) else 0 for c in completions], np.int64)
    pad, zero = np.array(pad_id, np.int64), np.array(0, np.float32)
    asked = _filled(in_prompt, prompts, pad)
    answered = _filled(there, [c.tokens for c in completions], pad)
    return {
        "input_ids": np.concatenate([asked, answered], axis=1),
        "attention_mask": np.concatenate([in_prompt, there], axis=1),
        "mask": _filled(there, [c.mask for c in completions], zero),
        "log_probs": _filled(there, [c.log_probs for c in completions], zero),
        "rewards": np.where(valid, rewards, 0).astype(np.float32),
        "groups": np.array([g.draw for g in groups for _ in g.completions], np.int64),
        "versions": _filled(there, [c.versions for c in completions], last[:, None]),
        "truncated": np.array([c.truncated for c in completions]),
        "valid": valid,
    }


def _filled(places: np.ndarray, rows: Sequence[np.ndarray], padding: np.ndarray) -> np.ndarray:
    """An array of padding with the rows, one after another, where there is a place."""
    found = np.broadcast_to(padding, places.shape).copy()
    found[places] = np.concatenate(rows)
    return found
