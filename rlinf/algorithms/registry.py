"""Which algorithms exist: a literal table, and entry points of packages outside.

A package adds an algorithm by an entry point in the group ``rlinf.algorithms`` that names its
config class, a subclass of :class:`~rlinf.algorithms.base_config.AlgorithmConfig`, which says whose
policies it trains.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

from rlinf.algorithms.base_config import AlgorithmConfig, FamilySection, PolicyConfig
from rlinf.config.registry import Registry
from rlinf.errors import ConfigError

ALGORITHMS = {
    "ppo": "rlinf.algorithms.config:PPOConfig",
    "grpo": "rlinf.algorithms.config:GRPOConfig",
    "dapo": "rlinf.algorithms.config:DAPOConfig",
    "dr_grpo": "rlinf.algorithms.config:DrGRPOConfig",
    "reinforce_pp": "rlinf.algorithms.config:ReinforcePPConfig",
    "rloo": "rlinf.algorithms.config:RLOOConfig",
    "gspo": "rlinf.algorithms.config:GSPOConfig",
    "cispo": "rlinf.algorithms.config:CISPOConfig",
    "decoupled_ppo": "rlinf.algorithms.config:DecoupledPPOConfig",
    "sac": "rlinf.algorithms.config:SACConfig",
}

_FORMER_GROUP = "rlinf.token_algorithms"


class AlgorithmRegistry(Registry[AlgorithmConfig]):
    """The algorithms; one that a package offers in a group that is not read is refused by name."""

    def load(self, name: str) -> type[AlgorithmConfig]:
        """See :meth:`Registry.load`."""
        if name not in self.names() and entry_points(group=_FORMER_GROUP, name=name):
            raise ConfigError(
                f"algorithm `{name}` is offered in the entry-point group {_FORMER_GROUP}, which is "
                "not read; its package must name it in rlinf.algorithms"
            )
        return super().load(name)


REGISTRY = AlgorithmRegistry("algorithm", "rlinf.algorithms", ALGORITHMS, AlgorithmConfig)

ActionAlgorithm = Annotated[AlgorithmConfig, FamilySection(REGISTRY, "actions")]
"""The algorithm section of a run that trains policies for actions."""
TokenAlgorithm = Annotated[PolicyConfig, FamilySection(REGISTRY, "tokens")]
"""The algorithm section of a run that trains language models."""
