"""Is the final answer mathematically equal to a reference?

Needs the package math-verify, and the main thread, in which alone a signal can end a comparison.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlinf.errors import MissingPackageError
from rlinf.rewards.extraction import last_boxed, references
from rlinf.rewards.protocol import RewardFunction, RewardInput

if TYPE_CHECKING:
    from rlinf.rewards.config import MathConfig

_AGAIN_SECONDS = 0.2


class _OutOfTime(BaseException):
    """No subclass of Exception: the libraries below catch those and go on."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`_OutOfTime` in the main thread after so many seconds, again and again."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class MathReward(RewardFunction):
    """`max_value` for an answer that equals any reference, `min_value` for all else.

    Raises:
        MissingPackageError: math-verify is not installed.
    """

    def __init__(self, config: MathConfig) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise MissingPackageError("math_verify", "language", "the reward `math`") from error
        # It warns that its own time limits are off; ours takes their place.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._config = config
        self._library = math_verify
        # All completions of a prompt have the same references.
        self._read_reference = lru_cache(maxsize=1024)(self._parse_reference)

    def __call__(self, sample: RewardInput) -> float:
        """Compare the final answer with the references."""
        config = self._config
        wanted = [self._read_reference(text) for text in references(sample.answer)]
        try:
            with _time_limit(config.seconds):
                right = self._equals_any(sample.completion, wanted)
        except _OutOfTime:
            right = False
        return (config.max_value if right else config.min_value) * config.scale

    def _equals_any(self, completion: str, wanted: list[list[Any]]) -> bool:
        boxed = last_boxed(completion)
        if boxed is not None:
            answer = self._parse(rf"\boxed{{{boxed}}}")
        elif self._config.require_boxed:
            return False
        else:
            answer = self._parse(completion[-self._config.tail :])
        return any(
            self._library.verify(
                reference, answer, float_rounding=self._config.digits, timeout_seconds=None
            )
            for reference in wanted
        )

    def _parse(self, text: str) -> list[Any]:
        found: list[Any] = self._library.parse(text, parsing_timeout=None)
        return found

    def _parse_reference(self, text: str) -> list[Any]:
        """Return the expressions of a reference: of text with marks, or of a bare formula.

        Raises:
            ValueError: It holds no expression, or reading it takes too long.
        """
        marked = "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text
        try:
            with _time_limit(self._config.seconds):
                found = [] if marked else self._parse(f"${text}$")
                found = found or self._parse(text)
        except _OutOfTime as error:
            raise ValueError(f"reading the reference {text[:100]!r} takes too long") from error
        if not found:
            raise ValueError(f"the reference {text[:100]!r} holds no mathematical expression")
        return found
