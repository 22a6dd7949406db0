"""Draws tokens: one uniform number per token, a function of seed and position alone.

n sequences, V tokens of the vocabulary. The token is read off the cumulative distribution at that
number (inverse transform sampling), so a sequence does not depend on what runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 40  # of the uniform number: fewer than a float64 has, so that u · total < total


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Counter-based uniform numbers [n] float64 in [0, 1).

    They are those of ``seeds`` [n] uint64 and ``positions`` [n] of tokens in their completions,
    mixed as in SplitMix64 (Steele, Lea and Flood 2014, figure 15).
    """
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What changes the distribution of m of the rows besides temperature."""

    rows: Tensor  # [m] int64, which
    seen: Tensor | None  # [m, S] int64 tokens that occurred, filled up with any; None: no penalty
    penalty: Tensor  # [m, 1] float32, repetition penalty
    banned: Tensor | None  # [m, V] bool, tokens that must not be drawn; None: there are none
    top_k: Tensor | None  # [m, 1] int64, how many of the most likely, V for all; None: all
    top_p: Tensor  # [m, 1] float32, sum of the probabilities to draw from


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How n tokens are drawn."""

    uniforms: Tensor  # [n] float64
    temperature: Tensor | None = None  # [n, 1] float32; None: all are 1
    greedy: Tensor | None = None  # [n] bool; None: no row takes the most likely token
    filters: Filters | None = None  # for the rows that have any


def draw_tokens(logits: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` [n, V].

    Returns:
        Tokens [n] int64, and their log-probs [n] float32 under softmax(logits / temperature) over
        the whole vocabulary, whatever was filtered.
    """
    logits = logits.float()
    scaled = logits if draw.temperature is None else logits / draw.temperature
    log_probs = scaled.log_softmax(-1)
    choice = log_probs
    if draw.filters is not None:
        rows = draw.filters.rows
        temperature = None if draw.temperature is None else draw.temperature[rows]
        choice = log_probs.index_copy(0, rows, _filtered(logits[rows], temperature, draw.filters))
    cumulative = choice.exp().cumsum(-1, dtype=torch.float64)
    target = draw.uniforms[:, None] * cumulative[:, -1:]
    # A row that is not a number has no token; the last one keeps the index legal, and the log-prob
    # tells.
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(
        max=logits.shape[1] - 1
    )
    if draw.greedy is not None:
        tokens = torch.where(draw.greedy, choice.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _filtered(logits: Tensor, temperature: Tensor | None, filters: Filters) -> Tensor:
    """[m, V] log-probs of the distributions that tokens are drawn from."""
    if filters.seen is not None:
        seen, penalty = logits.gather(1, filters.seen), filters.penalty
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        logits = logits.scatter(1, filters.seen, seen)
    if filters.banned is not None:
        logits = logits.masked_fill(filters.banned, -torch.inf)
    if temperature is not None:
        logits = logits / temperature
    if filters.top_k is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(rank >= filters.top_k, -torch.inf)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= filters.top_p
        beyond[:, 0] = False
        logits = torch.empty_like(logits).scatter_(
            1, order, ordered.masked_fill(beyond, -torch.inf)
        )
    return logits.log_softmax(-1)
