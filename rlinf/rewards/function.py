"""A reward function of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Literal

from rlinf.config.user_function import UserFunctionConfig
from rlinf.rewards.protocol import RewardFunction, RewardFunctionConfig


class FunctionConfig(UserFunctionConfig, RewardFunctionConfig):
    """A function of your own."""

    type: Literal["function"] = "function"
    """Which reward this section configures."""

    def build(self) -> RewardFunction:
        """``function(sample, **options)``; ConfigError where it cannot be imported or called."""
        return partial(self.load(), **self.options)
