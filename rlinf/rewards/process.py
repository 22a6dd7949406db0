"""A process of the reward pool: builds the functions, then scores sample by sample.

Scoring happens in the main thread, because some libraries limit their time by signals. Imports no
torch unless a user's function does.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import numbers
import os
import resource
from collections.abc import Callable
from typing import Any

from rlinf.errors import in_section, told
from rlinf.processes.child import serve
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import RewardFunction, RewardInput, RewardOutput

_LARGEST = 3.4028234663852886e38
"""Finite number of 32 bits, which rewards are stored in."""


class Scorer:
    """The functions of a recipe, built, and their weighted sum.

    ``at`` is called before each function of a sample with its number, at most 255.
    """

    def __init__(self, config: RewardConfig, *, at: Callable[[int], object] = int) -> None:
        self._at = at
        self._weights = {name: section.weight for name, section in config.functions.items()}
        self._functions: dict[str, RewardFunction] = {}
        for name, section in config.functions.items():
            with in_section(f"functions.{name}"):
                self._functions[name] = section.build()

    def score(self, sample: RewardInput) -> RewardOutput:
        """What a sample is worth; a function that fails makes it invalid."""
        parts: dict[str, float] = {}
        for place, (name, function) in enumerate(self._functions.items()):
            self._at(place)
            try:
                value: Any = function(sample)
            except Exception as error:  # noqa: BLE001 - one sample must not end the run
                return RewardOutput.invalid(name, "exception", told(error), parts)
            detail = ""
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                detail = f"it returned {value!r:.200}, a {type(value).__name__}, not a number"
            elif not abs(number := _as_float(value)) <= _LARGEST:  # NaN is neither
                detail = f"it returned {number}, no finite number of 32 bits"
            if detail:
                return RewardOutput.invalid(name, "not_a_number", detail, parts)
            parts[name] = number
        weighted = [self._weights[name] * value for name, value in parts.items()]
        largest = max(map(abs, [*weighted, sum(weighted)]), default=0.0)
        if not largest <= _LARGEST:
            detail = f"the weighted sum has {largest}, no finite number of 32 bits"
            return RewardOutput.invalid("", "not_a_number", detail, parts)
        return RewardOutput(reward=math.fsum(weighted), parts=parts)


def _as_float(value: Any) -> float:
    """Infinity for whole numbers that none stands for."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def main(lifeline: int, commands: int, progress: int) -> None:
    """Serve one pool until it goes away.

    Args:
        lifeline: See :func:`~rlinf.processes.child.serve`, like ``commands``.
        commands: Descriptor of the socket to the pool.
        progress: Descriptor of a file that holds the number of the function at work, for the case
            that it never ends.
    """
    scorer: Scorer | None = None

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal scorer
        if message["operation"] == "score" and scorer is not None:
            return {"output": dataclasses.asdict(scorer.score(RewardInput(**message["sample"])))}
        if message["operation"] == "start":
            config = RewardConfig.model_validate(message["config"])
            if config.memory_mib is not None:
                _limit_memory(config.memory_mib * 2**20)
            scorer = Scorer(config, at=lambda number: os.pwrite(progress, bytes([number]), 0))
            gc.collect()
            gc.freeze()
        return {}

    serve(lifeline, commands, answer)


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
