"""Which models exist: a literal table, and entry points of packages outside.

A package adds a model by an entry point in the group ``rlinf.models`` that names its config class,
a subclass of :class:`~rlinf.models.config.ModelConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.config.registry import Registry
from rlinf.models.config import ModelConfig

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import Policy

__all__ = ["MODELS", "REGISTRY", "ModelConfig", "build_policy"]

MODELS = {
    "mlp": "rlinf.models.config:MLPConfig",
    "squashed_mlp": "rlinf.models.config:SquashedMLPConfig",
    "cnn": "rlinf.models.config:CNNConfig",
}

REGISTRY = Registry("model", "rlinf.models", MODELS, ModelConfig)


def build_policy(
    config: ModelConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
) -> Policy:
    """The policy of a config section; see :meth:`ModelConfig.build`."""
    return config.build(env_spec, value_dim=value_dim, seed=seed)
