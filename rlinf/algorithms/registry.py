"""Which algorithms exist: a literal table, and entry points of packages outside.

A package adds an algorithm by an entry point in the group ``rlinf.algorithms`` that names its
config class, a subclass of :class:`~rlinf.algorithms.config.AlgorithmConfig`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm

__all__ = ["ALGORITHMS", "AlgorithmConfig", "build_algorithm", "config_class", "names"]

ALGORITHMS = {
    "ppo": "rlinf.algorithms.config:PPOConfig",
    "grpo": "rlinf.algorithms.config:GRPOConfig",
}


def names() -> list[str]:
    """The known algorithm types, sorted."""
    return sorted({*ALGORITHMS, *(point.name for point in entry_points(group="rlinf.algorithms"))})


def config_class(name: str) -> type[AlgorithmConfig]:
    """The config class of an algorithm type.

    Raises:
        ConfigError: the type is unknown.
    """
    if name in ALGORITHMS:
        module, _, attribute = ALGORITHMS[name].partition(":")
        found: type[AlgorithmConfig] = getattr(import_module(module), attribute)
        return found
    for point in entry_points(group="rlinf.algorithms", name=name):
        return point.load()  # type: ignore[no-any-return]
    raise ConfigError(f"unknown algorithm `{name}`; {did_you_mean(name, names())}")


def build_algorithm(config: AlgorithmConfig, *, group_size: int = 1) -> Algorithm:
    """The algorithm of a config section; see :meth:`AlgorithmConfig.build`."""
    return config.build(group_size=group_size)
