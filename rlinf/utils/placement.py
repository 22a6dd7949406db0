"""Execution modes of placements, under the name by which published programs look for them."""

from rlinf.scheduler.compat.placement_modes import (
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    PlacementMode,
    RolloutSyncMode,
)

__all__ = [
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "PlacementMode",
    "RolloutSyncMode",
]
