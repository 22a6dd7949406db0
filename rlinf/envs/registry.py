"""Where adapters are found: a literal table, and the entry points of other packages."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from rlinf.envs.base import SimulatorEnv
from rlinf.errors import ConfigError

ADAPTERS = {
    "gymnasium": "rlinf.envs.gymnasium_env:GymnasiumEnv",
    "metaworld": "rlinf.envs.metaworld:MetaWorldEnv",
}

ENTRY_POINT_GROUP = "rlinf.envs"


def env_types() -> dict[str, str]:
    """Return every known env type and the class behind it, as ``module:Class``."""
    outside = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return {**outside, **ADAPTERS}


def env_class(name: str) -> type[SimulatorEnv]:
    """Return the adapter class of an env type; imports its file, not its simulator.

    Raises:
        ConfigError: The type is unknown, or its file cannot be imported.
    """
    known = env_types()
    if name not in known:
        from rlinf.config.nearest import did_you_mean

        raise ConfigError(f"unknown env type `{name}`; {did_you_mean(name, known)}")
    module, _, attribute = known[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"env type `{name}` is registered as {known[name]}, which cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, SimulatorEnv)):
        raise ConfigError(f"env type `{name}`: {known[name]} is no subclass of SimulatorEnv")
    return found
