"""Scores samples in this process: every function of the recipe, and their weighted sum."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from rlinf.errors import in_section
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import FaultKind, RewardFunction, RewardInput, RewardOutput


def invalid(name: str, kind: FaultKind, detail: str, parts: dict[str, float]) -> RewardOutput:
    """Return the outcome of a sample that the function ``name`` could not score."""
    fault = f"{name}/{kind}" if name else kind
    reason = f"{fault}: {detail}"
    return RewardOutput(reward=0.0, parts=parts, valid=False, fault=fault, reason=reason[:2000])


class Scorer:
    """The functions of a recipe, built.

    Args:
        config: The functions and their weights.
        at: Called before each function of a sample with its number, at most 255.

    Raises:
        UserError: One of them cannot be built.
    """

    def __init__(self, config: RewardConfig, *, at: Callable[[int], object] = int) -> None:
        self._at = at
        self._weights = {name: section.weight for name, section in config.functions.items()}
        self._functions: dict[str, RewardFunction] = {}
        for name, section in config.functions.items():
            with in_section(f"functions.{name}"):
                self._functions[name] = section.build()

    def score(self, sample: RewardInput) -> RewardOutput:
        """Return what a sample is worth; a function that fails makes it invalid."""
        parts: dict[str, float] = {}
        for number, (name, function) in enumerate(self._functions.items()):
            self._at(number)
            try:
                value: Any = function(sample)
            except Exception as error:  # noqa: BLE001 - one sample must not end the run
                text = " ".join(f"{type(error).__name__}: {error}".split())
                return invalid(name, "exception", text, parts)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                detail = f"it returned {value!r:.200}, a {type(value).__name__}, not a number"
                return invalid(name, "not_a_number", detail, parts)
            if not math.isfinite(value):
                return invalid(name, "not_a_number", f"it returned {float(value)}", parts)
            parts[name] = float(value)
        reward = math.fsum(self._weights[name] * value for name, value in parts.items())
        return RewardOutput(reward=reward, parts=parts)
