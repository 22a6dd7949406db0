"""A soft penalty of over-long completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.rewards.protocol import RewardFunction, RewardInput

if TYPE_CHECKING:
    from rlinf.rewards.config import LengthConfig


def over_long_penalty(*, length: int, max_length: int, cache_length: int) -> float:
    """Return R_length in [−1, 0] (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    0 up to L_max − L_cache, then linear to −1 at L_max, −1 beyond.

    Args:
        length: |y|, tokens.
        max_length: L_max, tokens.
        cache_length: L_cache, tokens, at least 1.
    """
    free = max_length - cache_length
    return max(min((free - length) / cache_length, 0.0), -1.0)


class LengthReward(RewardFunction):
    """The penalty of a completion's number of tokens."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    def __call__(self, sample: RewardInput) -> float:
        """Return the penalty."""
        return over_long_penalty(
            length=sample.num_tokens,
            max_length=self._config.max_length,
            cache_length=self._config.cache_length,
        )
