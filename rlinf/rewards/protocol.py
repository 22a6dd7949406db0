"""What a reward function gets and gives.

A reward function of a package outside, or of a file beside the recipe, is a function::

    def score(sample: RewardInput, **options) -> float: ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """

    prompt: str
    completion: str
    num_tokens: int
    stop_reason: StopReason = "stop"
    answer: Any = None


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


class RewardFunction(ABC):
    """A reward of this project or of a package outside that has a config class of its own.

    It is built from its config section in each process of the pool, and called in the main thread
    there.
    """

    @abstractmethod
    def __call__(self, sample: RewardInput) -> float:
        """Return what the sample is worth, before weighting.

        An exception makes the sample invalid; a wrong answer is a number.
        """
