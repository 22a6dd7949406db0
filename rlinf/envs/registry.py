"""Which envs exist: a literal table, and entry points of packages outside.

A package adds an env by an entry point in the group ``rlinf.envs`` that names its adapter, a
subclass of :class:`~rlinf.envs.base.SimulatorEnv`. To import an adapter does not import its
simulator.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.envs.base import SimulatorEnv

ADAPTERS = {
    "gymnasium": "rlinf.envs.gymnasium_env:GymnasiumEnv",
    "metaworld": "rlinf.envs.metaworld.adapter:MetaWorldEnv",
}

REGISTRY = Registry("env type", "rlinf.envs", ADAPTERS, SimulatorEnv)
