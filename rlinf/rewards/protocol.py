"""What a reward function gets and gives, the base of its config section, and which ones exist.

A function of your own, in a file beside the recipe, is ``def score(sample, **options) -> float``;
one that compares the completions of a prompt is ``def score(samples, **options) -> list[float]``.
Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import Registry

StopReason = Literal["stop", "length", "abort"]

FaultKind = Literal["exception", "not_a_number", "timeout", "died"]
"""What can go wrong with a sample: the function raised, returned no finite number, took longer than
the deadline, or its process ended."""


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One completion to be scored.

    Args:
        prompt: Text of the prompt.
        completion: Text of the completion: what the model said, without what tools replied.
        num_tokens: Sampled tokens of the completion.
        stop_reason: Why it ended; ``length`` where the token limit cut it off.
        answer: Reference of the prompt, as the data set gives it: any JSON.
        columns: What else `data.files.columns` takes of the prompt's record, by key.
        calls: Of each turn that a tool replied to, what the model said in it and what it was given,
            as a pair of texts; both with the marks around them.
        values: What the functions of single completions gave, by name, before weighting; for those
            of groups, which are called after them.
    """

    prompt: str
    completion: str
    num_tokens: int
    stop_reason: StopReason = "stop"
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    calls: Sequence[Sequence[str]] = ()
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """What a completion is worth.

    Args:
        reward: Σ weight · value over all functions; 0 where it is not valid.
        parts: Value of each function by its name in the recipe, before weighting; without those
            that were not reached.
        valid: False where a function failed: the completion must not be trained on.
        fault: What went wrong, short and the same for all such samples: ``math/timeout``.
        reason: The same with its particulars.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    valid: bool = True
    fault: str | None = None
    reason: str | None = None

    @classmethod
    def invalid(
        cls, name: str, kind: FaultKind, detail: str, parts: Mapping[str, float] | None = None
    ) -> RewardOutput:
        """The outcome of a sample that the function ``name`` could not score."""
        fault = f"{name}/{kind}" if name else kind
        reason = f"{fault}: {detail}"[:2000]
        return cls(reward=0.0, parts=parts or {}, valid=False, fault=fault, reason=reason)


RewardFunction = Callable[[RewardInput], float]
"""Called in the main thread of a process of the pool; gives what a sample is worth, before
weighting. An exception makes the sample invalid; a wrong answer is a number."""

GroupRewardFunction = Callable[[Sequence[RewardInput]], Sequence[float]]
"""The same for all completions of a prompt at once, without those that are invalid already: gives a
number for each of them, in their order. An exception makes all of them invalid."""


class RewardFunctionConfig(StrictModel):
    """Base of every reward's config section: it scores by itself, or builds what does."""

    of_groups: ClassVar[bool] = False
    """Whether what it builds is a :data:`GroupRewardFunction`."""
    imported: ClassVar[tuple[str, ...]] = ()
    """Packages that take long to import, which is done once for all processes that score: importing
    them begins no thread."""

    type: str
    """Which reward this section configures."""
    weight: float = 1.0
    """Factor of its value in the sum; negative for a penalty that counts upward, 0 to log only."""

    @property
    def longest_seconds(self) -> float:
        """Seconds by which it ends a sample of its own accord; 0 where it has no such limit."""
        return 0.0

    def check_answer(self, answer: Any) -> None:
        """Refuse, by a ValueError that says why, a reference answer by which no completion can be
        scored; called before a run starts. Without a rule any is fine."""

    def build(self) -> RewardFunction | GroupRewardFunction:
        """The function, as ``of_groups`` says; UserError if what the section names, or a package,
        is not there.

        Called in each process that scores: what takes long to import is imported here.
        """
        return self.score

    def score(self, sample: RewardInput) -> float:
        """See :data:`RewardFunction`; of a section that needs nothing but its own values."""
        raise NotImplementedError


class AnswerConfig(RewardFunctionConfig):
    """What rewards have in common that tell right from wrong."""

    max_value: float = 1.0
    """Value of a right answer."""
    min_value: float = 0.0
    """Value of a wrong answer."""
    scale: float = 1.0
    """Factor of both."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_value <= self.min_value:
            raise illegal(
                "max_value",
                f"a right answer must be worth more than a wrong one, which is {self.min_value}",
                hint=f"nearest: {self.min_value + 1}",
            )
        return self

    def value_of(self, right: bool) -> float:
        """Value of a right or a wrong answer."""
        return (self.max_value if right else self.min_value) * self.scale


REWARDS = {
    "math": "rlinf.rewards.math_answer:MathConfig",
    "exact_match": "rlinf.rewards.text:ExactMatchConfig",
    "format": "rlinf.rewards.text:FormatConfig",
    "length": "rlinf.rewards.text:LengthConfig",
    "code": "rlinf.rewards.code_tests:CodeConfig",
    "function": "rlinf.rewards.function:FunctionConfig",
    "group_function": "rlinf.rewards.function:GroupFunctionConfig",
}

REGISTRY = Registry("reward", "rlinf.rewards", REWARDS, RewardFunctionConfig)
"""Packages outside add rewards by entry points in this group that name their config classes."""
