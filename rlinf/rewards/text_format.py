"""Has a completion the wanted form?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlinf.rewards.extraction import last_boxed
from rlinf.rewards.protocol import RewardFunction, RewardInput

if TYPE_CHECKING:
    from rlinf.rewards.config import FormatConfig


class FormatReward(RewardFunction):
    """`max_value` for the wanted form, `min_value` for any other."""

    def __init__(self, config: FormatConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern, re.DOTALL) if config.pattern else None

    def __call__(self, sample: RewardInput) -> float:
        """Look at the form of the completion."""
        config = self._config
        text = f"<think>{sample.completion}" if config.think_in_prompt else sample.completion
        right = self._is_right(text)
        return (config.max_value if right else config.min_value) * config.scale

    def _is_right(self, text: str) -> bool:
        if self._pattern is not None:
            return self._pattern.fullmatch(text) is not None
        if self._config.form == "boxed":
            return last_boxed(text) is not None
        return has_form(
            text, think="think" in self._config.form, answer="answer" in self._config.form
        )


def has_form(text: str, *, think: bool, answer: bool) -> bool:
    """Whether each wanted section stands there once, in this order, with something in it.

    A text that thinks begins with its thoughts; one that answers ends with its answer. Between the
    two only white space may stand; without an answer section, any text that is not empty follows.
    """
    rest = text.strip()
    if think:
        thoughts = _section(rest, "think")
        if thoughts is None:
            return False
        rest = rest[thoughts:].strip()
    if not answer:
        return bool(rest)
    if not think:
        rest = rest[max(rest.find("<answer>"), 0) :]
    return _section(rest, "answer") == len(rest)


def _section(text: str, name: str) -> int | None:
    """Return where the section that a text begins with ends, None without the only one of it."""
    opening, closing = f"<{name}>", f"</{name}>"
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return None
    end = text.find(closing)
    return end + len(closing) if text[len(opening) : end].strip() else None
