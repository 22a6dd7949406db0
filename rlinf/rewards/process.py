"""A process of the reward pool: builds the functions, then scores samples and groups of them.

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
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rlinf.errors import in_section, told
from rlinf.processes.child import serve
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import FaultKind, RewardInput, RewardOutput

_LARGEST = 3.4028234663852886e38
"""Finite number of 32 bits, which rewards are stored in."""


class _FunctionError(Exception):
    """What a function did instead of giving numbers."""

    def __init__(self, name: str, kind: FaultKind, detail: str) -> None:
        super().__init__(name, kind, detail)
        self._said: tuple[str, FaultKind, str] = (name, kind, detail)

    def output(self, parts: dict[str, float]) -> RewardOutput:
        """What becomes of a sample that has ``parts`` so far."""
        return RewardOutput.invalid(*self._said, parts)


class Scorer:
    """The functions of a recipe, built, and their weighted sum.

    ``at`` is called before each function of a sample with its number, at most 255.
    """

    def __init__(self, config: RewardConfig, *, at: Callable[[int], object] = int) -> None:
        self._at = at
        self._weights = {name: section.weight for name, section in config.functions.items()}
        self._places = {name: place for place, name in enumerate(config.functions)}
        self._of_samples: dict[str, Callable[[Any], Any]] = {}
        self._of_groups: dict[str, Callable[[Any], Any]] = {}
        for name, section in config.functions.items():
            with in_section(f"functions.{name}"):
                functions = self._of_groups if section.of_groups else self._of_samples
                functions[name] = section.build()

    def score(self, sample: RewardInput) -> RewardOutput:
        """What a sample is worth by the functions of single ones; one that fails makes it
        invalid."""
        parts: dict[str, float] = {}
        try:
            for name, function in self._of_samples.items():
                parts[name] = _number(name, self._call(name, function, sample))
        except _FunctionError as failure:
            return failure.output(parts)
        return self._weighted(parts)

    def score_group(self, samples: Sequence[RewardInput]) -> list[RewardOutput]:
        """What the samples of a group are worth, with the values that they have already; a function
        of groups that fails makes all of them invalid."""
        parts = [dict(sample.values) for sample in samples]
        try:
            for name, function in self._of_groups.items():
                values = _numbers(name, self._call(name, function, samples), len(samples))
                for part, value in zip(parts, values, strict=True):
                    part[name] = value
        except _FunctionError as failure:
            return [failure.output(part) for part in parts]
        return [self._weighted(part) for part in parts]

    def _call(self, name: str, function: Callable[[Any], Any], given: Any) -> Any:
        self._at(self._places[name])
        try:
            return function(given)
        except Exception as error:
            raise _FunctionError(name, "exception", told(error)) from error

    def _weighted(self, parts: dict[str, float]) -> RewardOutput:
        weighted = [self._weights[name] * value for name, value in parts.items()]
        largest = max(map(abs, [*weighted, sum(weighted)]), default=0.0)
        if not largest <= _LARGEST:
            detail = f"the weighted sum has {largest}, no finite number of 32 bits"
            return RewardOutput.invalid("", "not_a_number", detail, parts)
        return RewardOutput(reward=math.fsum(weighted), parts=parts)


def _numbers(name: str, values: Any, expected: int) -> list[float]:
    """What a function of groups returned: a number for each sample."""
    try:
        listed = None if isinstance(values, (str, bytes, Mapping, Set)) else list(values)
    except TypeError:
        listed = None
    if listed is None or len(listed) != expected:
        number = "" if listed is None else f"{len(listed)} values, "
        raise _FunctionError(
            name,
            "not_a_number",
            f"it returned {number}{values!r:.200}, a {type(values).__name__}, where a list of "
            f"{expected} numbers is due, one for each completion",
        )
    return [_number(name, value) for value in listed]


def _number(name: str, value: Any) -> float:
    detail = ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        detail = f"it returned {value!r:.200}, a {type(value).__name__}, not a number"
    elif not abs(number := _as_float(value)) <= _LARGEST:  # NaN is neither
        detail = f"it returned {number}, no finite number of 32 bits"
    if detail:
        raise _FunctionError(name, "not_a_number", detail)
    return number


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
            samples = [RewardInput(**sample) for sample in message["samples"]]
            whole = message["whole"]
            outputs = scorer.score_group(samples) if whole else map(scorer.score, samples)
            return {"outputs": [dataclasses.asdict(output) for output in outputs]}
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
