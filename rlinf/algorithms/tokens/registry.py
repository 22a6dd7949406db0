"""Which token algorithms exist: a literal table, and entry points of packages outside.

A package adds an algorithm by an entry point in the group ``rlinf.token_algorithms`` that names its
config class, a subclass of :class:`~rlinf.algorithms.tokens.base_config.TokenAlgorithmConfig`.
"""

from __future__ import annotations

from rlinf.algorithms.tokens.base_config import TokenAlgorithmConfig
from rlinf.config.registry import Registry

__all__ = ["REGISTRY", "TOKEN_ALGORITHMS", "TokenAlgorithmConfig"]

TOKEN_ALGORITHMS = {
    "ppo": "rlinf.algorithms.tokens.config:PPOConfig",
    "grpo": "rlinf.algorithms.tokens.config:GRPOConfig",
    "dapo": "rlinf.algorithms.tokens.config:DAPOConfig",
    "dr_grpo": "rlinf.algorithms.tokens.config:DrGRPOConfig",
    "reinforce_pp": "rlinf.algorithms.tokens.config:ReinforcePPConfig",
    "rloo": "rlinf.algorithms.tokens.config:RLOOConfig",
    "gspo": "rlinf.algorithms.tokens.config:GSPOConfig",
    "cispo": "rlinf.algorithms.tokens.config:CISPOConfig",
    "decoupled_ppo": "rlinf.algorithms.tokens.config:DecoupledPPOConfig",
}

REGISTRY = Registry(
    "token algorithm", "rlinf.token_algorithms", TOKEN_ALGORITHMS, TokenAlgorithmConfig
)
