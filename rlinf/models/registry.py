"""Which models exist: a literal table, and entry points of packages outside.

A package adds a model by an entry point in the group ``rlinf.models`` that names its config class,
a subclass of :class:`~rlinf.models.config.ModelConfig`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.models.config import ModelConfig

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import Policy

__all__ = ["MODELS", "ModelConfig", "build_policy", "config_class", "names"]

MODELS = {
    "mlp": "rlinf.models.config:MLPConfig",
    "cnn": "rlinf.models.config:CNNConfig",
}


def names() -> list[str]:
    """The known model types, sorted."""
    return sorted({*MODELS, *(point.name for point in entry_points(group="rlinf.models"))})


def config_class(name: str) -> type[ModelConfig]:
    """The config class of a model type.

    Raises:
        ConfigError: the type is unknown.
    """
    if name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        found: type[ModelConfig] = getattr(import_module(module), attribute)
        return found
    for point in entry_points(group="rlinf.models", name=name):
        return point.load()  # type: ignore[no-any-return]
    raise ConfigError(f"unknown model `{name}`; {did_you_mean(name, names())}")


def build_policy(
    config: ModelConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
) -> Policy:
    """The policy of a config section; see :meth:`ModelConfig.build`."""
    return config.build(env_spec, value_dim=value_dim, seed=seed)
