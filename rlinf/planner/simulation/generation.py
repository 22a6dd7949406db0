"""When sequences of different lengths leave an engine that batches continuously.

An engine runs so many sequences at most. In each decoding step every running sequence gets one
token; where one ends, the next that waits begins. A step with ``r`` running sequences takes
``fixed + r · per_sequence`` seconds: reading the weights does not depend on the batch,
reading the caches does.

Counted in steps, the schedule does not depend on these times: a sequence ends as many steps after
it was admitted as it has tokens. And between two ends the number of running sequences is constant:
the most while sequences wait, then what is left. One event per sequence is therefore enough, and
exact; nothing is simulated token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.planner.profile import Measurement
from rlinf.planner.simulation.lengths import LengthDistribution

Floats = NDArray[np.float64]


class GenerationModel(StrictModel):
    """How long generation takes, for a component whose time depends on lengths."""

    lengths: LengthDistribution
    """Tokens of the responses."""
    max_running: int = Field(ge=1)
    """Sequences that run in one engine at the same time."""
    seconds_fixed: float = Field(ge=0)
    """Time of a decoding step that does not depend on the batch [s]."""
    seconds_per_sequence: float = Field(default=0.0, ge=0)
    """Time that each running sequence adds to a decoding step [s]."""

    def serve(self, lengths: NDArray[np.int64]) -> Floats:
        """Times at which sequences end in one engine, all of which wait from 0 on [s].

        Args:
            lengths: [N] tokens, in the order of admission.
        """
        ends: Floats = self._serve(lengths[None])[0]
        return ends

    def _serve(self, lengths: NDArray[np.int64]) -> Floats:
        """[E, N] the same for engines that have equally many sequences [s]."""
        if lengths.shape[1] <= self.max_running:
            steps = lengths.astype(np.int64)
        else:
            steps = np.stack([last_steps(each, self.max_running) for each in lengths])
        order = np.argsort(steps, axis=1, kind="stable")
        between = np.diff(np.take_along_axis(steps, order, axis=1), prepend=0)
        running = np.minimum(self.max_running, lengths.shape[1] - np.arange(lengths.shape[1]))
        step_seconds = self.seconds_fixed + self.seconds_per_sequence * running
        ends = np.empty(lengths.shape)
        np.put_along_axis(ends, order, np.cumsum(between * step_seconds, axis=1), axis=1)
        return ends

    def groups(
        self, rng: np.random.Generator, groups: int, group_size: int, engines: int
    ) -> tuple[Floats, Floats, int]:
        """Generate the responses of one step.

        Groups are shared out over the engines in blocks, as the executor does it.

        Returns:
            Time at which each group is complete [groups], time at which each engine is done
            [engines], and the tokens of all.
        """
        lengths = self.lengths.draw(rng, groups, group_size)
        first = -(-np.arange(engines + 1) * groups // engines)
        counts = np.diff(first)
        ready, done = np.zeros(groups), np.zeros(engines)
        for count in np.unique(counts[counts > 0]).tolist():
            alike = np.flatnonzero(counts == count)
            own = first[alike][:, None] + np.arange(count)
            ends = self._serve(lengths[own].reshape(len(alike), -1))
            ready[own] = ends.reshape(*own.shape, group_size).max(axis=2)
            done[alike] = ends.max(axis=1)
        return ready, done, int(lengths.sum())


def last_steps(lengths: NDArray[np.int64], max_running: int) -> NDArray[np.int64]:
    """[N] decoding step in which each sequence ends; admission is in order, at once."""
    steps = lengths.astype(np.int64).copy()
    if len(lengths) <= max_running:
        return steps
    running = steps[:max_running].tolist()
    heapq.heapify(running)
    for index in range(max_running, len(lengths)):
        steps[index] += running[0]
        heapq.heapreplace(running, int(steps[index]))
    return steps


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
