"""A model of generation whose time is the measured one.

A profile says how long generation takes, not how long the answers were. So the measured time
stands, and lengths say how it is spread: over engines, over the groups of a step and over steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf.planner.profile import Measurement
from rlinf.planner.simulation.generation import GenerationModel
from rlinf.planner.simulation.lengths import LengthDistribution

DRAWS = 41
"""Steps of which the model's median is taken."""


def calibrated(
    lengths: LengthDistribution,
    max_running: int,
    measured: Sequence[Measurement],
    *,
    seconds: float,
    groups: int,
    group_size: int,
    engines: int,
    devices_per_engine: int = 1,
) -> GenerationModel:
    """A model of generation that takes a given time in the median of steps.

    How a decoding step divides into its fixed part and one per running sequence is fitted to the
    measured sizes; where they do not tell, the step is fixed.

    Args:
        lengths: Tokens of the responses.
        max_running: Sequences that run in one engine at the same time.
        measured: Times of generation at several sizes.
        seconds: What it should take [s].
        groups: Groups of a step.
        group_size: Sequences of a group.
        engines: Engines that share the groups.
        devices_per_engine: Devices of one engine.
    """
    fixed, per_sequence = _decoding_step(
        lengths, max_running, measured, group_size, devices_per_engine
    )
    model = GenerationModel(
        lengths=lengths,
        max_running=max_running,
        seconds_fixed=fixed,
        seconds_per_sequence=per_sequence,
    )
    scale = seconds / _median_seconds(model, groups, group_size, engines)
    return model.model_copy(
        update={"seconds_fixed": scale * fixed, "seconds_per_sequence": scale * per_sequence}
    )


def _decoding_step(
    lengths: LengthDistribution,
    max_running: int,
    measured: Sequence[Measurement],
    group_size: int,
    devices_per_engine: int,
) -> tuple[float, float]:
    """Fixed part of a decoding step and the one per sequence, by least squares; none negative.

    The time of a generation is linear in both: it is the number of decoding steps times the one,
    and the running sequences, summed over the steps, times the other. Deviations count relative to
    the measured times.
    """
    parts = []
    for measurement in measured:
        groups = max(1, measurement.items // group_size)
        engines = min(groups, max(1, measurement.devices // devices_per_engine))
        parts.append(
            [
                _median_seconds(model, groups, group_size, engines) / measurement.seconds
                for model in _units(lengths, max_running)
            ]
        )
    matrix = np.array(parts)
    found, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=1e-3)
    if rank == 2 and (found >= 0).all():
        return float(found[0]), float(found[1])
    # Else the best fit that is allowed has one of the two parts only.
    alone = matrix.sum(axis=0) / (matrix**2).sum(axis=0)
    left = ((matrix * alone - 1) ** 2).sum(axis=0)
    if rank == 2 and left[1] < left[0]:
        return 0.0, float(alone[1])
    return float(alone[0]), 0.0


def _units(
    lengths: LengthDistribution, max_running: int
) -> tuple[GenerationModel, GenerationModel]:
    """Models that count decoding steps, and running sequences summed over them."""
    return (
        GenerationModel(lengths=lengths, max_running=max_running, seconds_fixed=1.0),
        GenerationModel(
            lengths=lengths, max_running=max_running, seconds_fixed=0.0, seconds_per_sequence=1.0
        ),
    )


def _median_seconds(model: GenerationModel, groups: int, group_size: int, engines: int) -> float:
    """Median time until the last engine is done [s]."""
    return float(
        np.median(
            [
                model.groups(np.random.default_rng(draw), groups, group_size, engines)[1].max()
                for draw in range(DRAWS)
            ]
        )
    )
