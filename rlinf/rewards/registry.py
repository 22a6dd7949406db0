"""Which reward functions exist: a literal table, and entry points of packages outside.

A package adds a reward by an entry point in the group ``rlinf.rewards`` that names its config
class, a subclass of :class:`~rlinf.rewards.base_config.RewardFunctionConfig`.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.rewards.base_config import RewardFunctionConfig

REWARDS = {
    "math": "rlinf.rewards.config:MathConfig",
    "exact_match": "rlinf.rewards.config:ExactMatchConfig",
    "format": "rlinf.rewards.config:FormatConfig",
    "length": "rlinf.rewards.config:LengthConfig",
    "code": "rlinf.rewards.config:CodeConfig",
    "function": "rlinf.rewards.config:FunctionConfig",
}

REGISTRY = Registry("reward", "rlinf.rewards", REWARDS, RewardFunctionConfig)
