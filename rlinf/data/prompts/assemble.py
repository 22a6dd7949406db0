"""Rectangular arrays of prompts and responses, as training takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.data.sequences import Completion, PromptGroup


@dataclass(frozen=True, kw_only=True)
class TokenArrays:
    """N sequences of S = P + L tokens: P of the longest prompt, L of the longest response.

    Args:
        input_ids: [N, S] int64, left-padded prompt | right-padded response.
        attention_mask: [N, S] bool, True where a token stands.
        position_ids: [N, S] int64, 0 at the first token of the prompt and left of it; right of
            the last token they go on.
        mask: [N, L] float32, 1 where a token was sampled; 0 for what tools replied.
        log_probs: [N, L] float32, 0 elsewhere.
        rewards: [N] float32, 0 where not valid.
        groups: [N] int64, the draw that the sequence answers.
        versions: [N, L] int64, of the weights that sampled the token; padding repeats the last.
        truncated: [N] bool, cut off by the token limit.
        valid: [N] bool, whether the reward could be computed.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    versions: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray

    def __len__(self) -> int:
        return len(self.mask)


def left_pad(
    sequences: Sequence[np.ndarray], *, pad_id: int, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Put sequences of different lengths at the right end of equal rows.

    Args:
        sequences: N arrays of tokens.
        pad_id: Token to the left of them.
        length: Length of the rows; None: that of the longest sequence.

    Returns:
        [N, length] int64 tokens, and [N, length] bool, True where a token stands.

    Raises:
        ValueError: A sequence is longer than ``length``.
    """
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    width = _width(lengths, length, "prompt")
    attention = np.arange(width) >= width - lengths[:, None]
    tokens = np.full((len(sequences), width), pad_id, np.int64)
    if len(sequences):
        tokens[attention] = np.concatenate(sequences)
    return tokens, attention


def assemble_sequences(
    groups: Sequence[PromptGroup],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> TokenArrays:
    """Lay out every completion of scored groups, in their order.

    Args:
        groups: Groups with scores and ended completions.
        pad_id: Token of the padding.
        prompt_length: P; None: the longest prompt.
        response_length: L; None: the longest response, at least 1.

    Raises:
        ValueError: There is no group, one has no scores, a completion was interrupted, or a
            sequence is longer than asked for.
    """
    completions = [completion for group in groups for completion in group.completions]
    if not completions:
        raise ValueError("there is no completion to assemble")
    if any(completion.stop_reason == "abort" for completion in completions):
        raise ValueError("a completion was interrupted; continue it before training on it")
    prompts = [group.prompt_tokens for group in groups for _ in group.completions]
    prompt_ids, prompt_attention = left_pad(prompts, pad_id=pad_id, length=prompt_length)
    lengths = np.array([len(completion) for completion in completions], np.int64)
    there = np.arange(_width(lengths, response_length, "response")) < lengths[:, None]
    response_ids = _filled(there, [c.tokens for c in completions], np.int64, pad_id)
    attention = np.concatenate([prompt_attention, there], axis=1)
    rewards, valid = _scores(groups)
    return TokenArrays(
        input_ids=np.concatenate([prompt_ids, response_ids], axis=1),
        attention_mask=attention,
        position_ids=position_ids(attention),
        mask=_filled(there, [c.mask for c in completions], np.float32, 0),
        log_probs=_filled(there, [c.log_probs for c in completions], np.float32, 0),
        rewards=rewards,
        groups=np.array([g.draw for g in groups for _ in g.completions], np.int64),
        versions=_versions(there, completions),
        truncated=np.array([c.truncated for c in completions]),
        valid=valid,
    )


def position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """[N, S] int64 positions that begin with 0 at the first token of each row."""
    first = attention_mask.argmax(axis=1)
    positions: np.ndarray = np.arange(attention_mask.shape[1])[None] - first[:, None]
    return positions.clip(min=0)


def _width(lengths: np.ndarray, wanted: int | None, what: str) -> int:
    longest = int(lengths.max(initial=1))
    if wanted is not None and longest > wanted:
        raise ValueError(f"a {what} has {longest} tokens, there is room for {wanted}")
    return longest if wanted is None else wanted


def _filled(
    there: np.ndarray, rows: Sequence[np.ndarray], dtype: type[np.generic], padding: int
) -> np.ndarray:
    found = np.full(there.shape, padding, dtype)
    found[there] = np.concatenate(rows)
    return found


def _versions(there: np.ndarray, completions: Sequence[Completion]) -> np.ndarray:
    last = np.array([c.versions[-1] if len(c) else 0 for c in completions], np.int64)
    found = np.repeat(last[:, None], there.shape[1], axis=1)
    found[there] = np.concatenate([c.versions for c in completions])
    return found


def _scores(groups: Sequence[PromptGroup]) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.concatenate([group.rewards for group in groups])
    scores = [score for group in groups for score in group.scores or ()]
    valid = np.array([score.valid for score in scores])
    return np.where(valid, rewards, 0).astype(np.float32), valid
