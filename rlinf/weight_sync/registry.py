"""Which weight syncers exist: a literal table, and entry points of packages outside.

A package adds a syncer by an entry point in the group ``rlinf.weight_syncers`` that names its
config class, a subclass of :class:`~rlinf.weight_sync.config.WeightSyncConfig`.
"""

from __future__ import annotations

from typing import Annotated

from rlinf.config.component import Component
from rlinf.config.registry import Registry
from rlinf.weight_sync.config import WeightSyncConfig

WEIGHT_SYNCERS = {
    "auto": "rlinf.weight_sync.config:AutoConfig",
    "reference": "rlinf.weight_sync.config:ReferenceConfig",
    "shared_memory": "rlinf.weight_sync.config:SharedMemoryConfig",
    "bucket": "rlinf.weight_sync.config:BucketConfig",
    "patch": "rlinf.weight_sync.config:PatchConfig",
}

REGISTRY = Registry("weight syncer", "rlinf.weight_syncers", WEIGHT_SYNCERS, WeightSyncConfig)

WeightSyncSection = Annotated[WeightSyncConfig, Component(REGISTRY)]
"""The section of a recipe that says how weights go from who trains them to who uses them."""
