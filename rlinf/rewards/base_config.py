"""The base of every reward's config section; imports nothing but the strict base."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.registry import load_attribute

if TYPE_CHECKING:
    from rlinf.rewards.protocol import RewardFunction


class RewardFunctionConfig(StrictModel):
    """Base of every reward's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the function, imported in the processes that score."""

    type: str
    """Which reward this section configures."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the sum; negative for a penalty that counts upward, 0 to log only."""

    @property
    def longest_seconds(self) -> float:
        """Seconds by which it ends a sample of its own accord; 0 where it has no such limit."""
        return 0.0

    def build(self) -> RewardFunction:
        """The function.

        Raises:
            ConfigError: What the section names cannot be used.
            MissingPackageError: A package is not installed.
        """
        function: RewardFunction = load_attribute(self.implementation)(self)
        return function
