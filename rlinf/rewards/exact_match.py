"""Is the answer the same text as a reference?"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from rlinf.rewards.extraction import last_answer, last_line, references
from rlinf.rewards.protocol import RewardFunction, RewardInput

if TYPE_CHECKING:
    from rlinf.rewards.config import ExactMatchConfig

_TOO_MANY_TAGS = 0.25
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(
    text: str,
    *,
    lower: bool = True,
    strip_punctuation: bool = True,
    strip_articles: bool = True,
    strip_whitespace: bool = True,
) -> str:
    """Return a text without what two equal answers may differ in (Rajpurkar et al. 2016, SQuAD)."""
    if lower:
        text = text.lower()
    if strip_punctuation:
        text = text.translate(_PUNCTUATION)
    if strip_articles:
        text = re.sub(r"\b(a|an|the)\b", " ", text, flags=re.IGNORECASE)
    if strip_whitespace:
        text = " ".join(text.split())
    return text


class ExactMatchReward(RewardFunction):
    """`max_value` for a reference, `found_value` for another answer, `min_value` for none."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern, re.DOTALL) if config.pattern else None

    def __call__(self, sample: RewardInput) -> float:
        """Compare the extracted answer with the references."""
        config = self._config
        wanted = {self._normalize(reference) for reference in references(sample.answer)}
        answer = self._extract(sample.completion)
        if answer is None:
            return config.min_value * config.scale
        if self._normalize(answer) not in wanted:
            value = config.min_value if config.found_value is None else config.found_value
            return value * config.scale
        if config.extract == "answer_tag" and self._tags(sample.completion) > config.max_tags:
            return config.max_value * config.scale * _TOO_MANY_TAGS
        return config.max_value * config.scale

    def _extract(self, text: str) -> str | None:
        if self._pattern is not None:
            found = list(self._pattern.finditer(text))
            return found[-1].group(self._pattern.groups) if found else None
        if self._config.extract == "answer_tag":
            return last_answer(text)
        return last_line(text) if self._config.extract == "last_line" else text

    @staticmethod
    def _tags(text: str) -> int:
        return text.count("<answer>")

    def _normalize(self, text: str) -> str:
        config = self._config
        return normalize(
            text,
            lower=config.lower,
            strip_punctuation=config.strip_punctuation,
            strip_articles=config.strip_articles,
            strip_whitespace=config.strip_whitespace,
        )
