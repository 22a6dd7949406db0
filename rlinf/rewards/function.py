"""Reward functions of the user's own: of one completion, or of all those of a prompt."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from rlinf.config.user_function import UserFunctionConfig
from rlinf.rewards.protocol import GroupRewardFunction, RewardFunction, RewardFunctionConfig


class FunctionConfig(UserFunctionConfig, RewardFunctionConfig):
    """A function of your own."""

    type: Literal["function"] = "function"
    """Which reward this section configures."""

    def build(self) -> RewardFunction:
        """``function(sample, **options)``; ConfigError where it cannot be imported or called."""
        return partial(self.load(), **self.options)


class GroupFunctionConfig(UserFunctionConfig, RewardFunctionConfig):
    """A function of your own that compares the completions of a prompt."""

    of_groups: ClassVar[bool] = True

    type: Literal["group_function"] = "group_function"
    """Which reward this section configures."""

    def build(self) -> GroupRewardFunction:
        """``function(samples, **options)``; ConfigError where it cannot be imported or called."""
        return partial(self.load(), **self.options)
