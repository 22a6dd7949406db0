"""What goes wrong between the two sides of a weight synchronisation."""

from __future__ import annotations

from rlinf.errors import RLinfError


class WeightSyncError(RLinfError):
    """An update did not arrive; the receiver keeps the version that it had."""


class NoSharedMemoryError(WeightSyncError):
    """There is no shared memory for the weights."""


class VersionSkewError(WeightSyncError):
    """A patch was made for other weights than the receiver has."""


class TornReadError(WeightSyncError):
    """Weights were changed while a receiver was reading them."""
