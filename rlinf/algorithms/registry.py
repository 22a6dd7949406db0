"""Which algorithms exist: a literal table, and entry points of packages outside.

A package adds an algorithm by an entry point in the group ``rlinf.algorithms`` that names its
config class, a subclass of :class:`~rlinf.algorithms.config.AlgorithmConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.registry import Registry

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm

__all__ = ["ALGORITHMS", "REGISTRY", "AlgorithmConfig", "build_algorithm"]

ALGORITHMS = {
    "ppo": "rlinf.algorithms.config:PPOConfig",
    "decoupled_ppo": "rlinf.algorithms.config:DecoupledPPOConfig",
    "grpo": "rlinf.algorithms.config:GRPOConfig",
    "sac": "rlinf.algorithms.config:SACConfig",
}

REGISTRY = Registry("algorithm", "rlinf.algorithms", ALGORITHMS, AlgorithmConfig)


def build_algorithm(config: AlgorithmConfig, *, group_size: int = 1) -> Algorithm:
    """The algorithm of a config section; see :meth:`AlgorithmConfig.build`."""
    return config.build(group_size=group_size)
