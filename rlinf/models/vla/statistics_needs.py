"""By which numbers values are normalised, and whether statistics have them; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.models.vla.statistics import Method

NEEDS: Mapping[str, tuple[str, str]] = {
    "mean_std": ("mean", "std"),
    "quantiles": ("q01", "q99"),
    "bounds": ("min", "max"),
    "min_max": ("min", "max"),
}
"""By method the numbers of each dimension that it computes with."""


def require_numbers(
    given: Mapping[str, np.ndarray], method: Method, *, of: str, key: str = "statistics"
) -> None:
    """Refuse, by a ConfigError of ``key``, statistics ``of`` something, by name [D] float32, that
    lack what a method computes with."""
    missing = [name for name in NEEDS[method] if name not in given]
    if missing:
        raise ConfigError(
            f"the statistics of {of} have no {' and '.join(missing)}, by which the model is "
            f"normalised, but {', '.join(given) or 'nothing'}; nearest: those of the set itself, "
            "with: rlinf data stats",
            key=key,
        )
    first, second = (given[name] for name in NEEDS[method])
    for name, value in zip(NEEDS[method], (first, second), strict=True):
        if not np.isfinite(value).all():
            place = int(np.argmin(np.isfinite(value)))
            raise ConfigError(
                f"the statistics of {of} hold {float(value[place])} as {name} of dimension "
                f"{place}; nearest: those of a set of finite numbers, with: rlinf data stats",
                key=key,
            )
    width = second if method == "mean_std" else second - first
    if (width < 0).any():
        place = int(np.argmax(width < 0))
        names = NEEDS[method][1:] if method == "mean_std" else NEEDS[method]
        told = ", ".join(f"{name} {float(given[name][place]):g}" for name in names)
        raise ConfigError(
            f"the statistics of {of} have a width below 0 in dimension {place} ({told}), which "
            "would turn its sign; nearest: those of the recorded set, with: rlinf data stats",
            key=key,
        )
    if not width.any():
        raise ConfigError(
            f"the statistics of {of} are of numbers that never change: {NEEDS[method][0]} "
            f"and {NEEDS[method][1]} leave no width in any dimension; nearest: those of the "
            "recorded set, with: rlinf data stats",
            key=key,
        )
