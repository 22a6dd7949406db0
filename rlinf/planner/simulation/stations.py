"""How one node spends its time on a device: chunk by chunk, as its input arrives.

The arrays count *units*, the smallest pieces that are handed over: groups of items.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def chunk_by_chunk(arrivals: Floats, begin: float, units: int, seconds: float) -> Floats:
    """When each unit leaves a stage that takes ``units`` of them at once, for ``seconds``.

    ``end_k = max(end_{k−1}, arrival of the last unit of chunk k) + seconds``, in closed form:
    ``end_k = max over j ≤ k of (arrival_j + (k − j + 1) · seconds)``.

    Args:
        arrivals: [U] ascending times at which units arrive [s].
        begin: When the stage can begin [s].
        units: Units of a chunk; divides U.
        seconds: Time per chunk [s].

    Returns:
        [U] ascending times [s].
    """
    last = np.maximum(arrivals[units - 1 :: units], begin)
    done = np.arange(len(last)) * seconds
    return np.repeat(np.maximum.accumulate(last - done) + done + seconds, units)


def play_loop(
    seconds: Sequence[float],
    homes: Sequence[object],
    *,
    exchanges: int,
    stages: int,
    closing: Sequence[float] = (),
    between: float = 0.0,
) -> float:
    """Time of a loop, sub-batch by sub-batch: each device serves who has waited longest [s].

    Args:
        seconds: Time of each stage for all exchanges of all sub-batches [s].
        homes: The devices of each stage; stages with equal homes take turns.
        exchanges: How often a sub-batch passes through all stages.
        stages: Sub-batches in flight.
        closing: Part of each stage's time that is spent in a last pass, after the exchanges [s].
        between: Time of an exchange in which no stage works [s].
    """
    # The first stage sends without work what the others begin with: it is the last of a pass.
    seconds, homes = [*seconds[1:], seconds[0]], [*homes[1:], homes[0]]
    once = [*closing[1:], *closing[:1]] or [0.0] * len(seconds)
    passes = [[(s - c) / (exchanges * stages) for s, c in zip(seconds, once, strict=True)]]
    passes = passes * exchanges + [[c / stages for c in once]]
    free: dict[object, float] = dict.fromkeys(homes, 0.0)
    # Time of arrival, then the order of arrival, which also makes equal times deterministic.
    waiting = [(0.0, sub, 0, 0) for sub in range(stages)]
    arrived, end = stages, 0.0
    while waiting:
        ready, _, exchange, stage = heapq.heappop(waiting)
        free[homes[stage]] = left = max(ready, free[homes[stage]]) + passes[exchange][stage]
        end = max(end, left + between * (exchange < exchanges))
        if stage + 1 < len(seconds):
            heapq.heappush(waiting, (left, arrived, exchange, stage + 1))
        elif exchange + 1 < len(passes):
            heapq.heappush(waiting, (left + between, arrived, exchange + 1, 0))
        arrived += 1
    return end


def pass_through(arrivals: Floats, seconds: Sequence[float], homes: Sequence[object]) -> Floats:
    """When each unit leaves a loop whose stages serve units as they come, without a bound.

    Args:
        arrivals: [U] ascending times at which units have left the first stage [s].
        seconds: Time of each further stage for all units [s].
        homes: Devices of each further stage.

    Returns:
        [U] ascending times [s].
    """
    waiting = [(float(t), unit, 0) for unit, t in enumerate(arrivals)]
    free = dict.fromkeys(homes, 0.0)
    ends = np.empty(len(arrivals))
    while waiting:
        ready, unit, stage = heapq.heappop(waiting)
        if stage == len(seconds):
            ends[unit] = ready
            continue
        home = homes[stage]
        free[home] = max(ready, free[home]) + seconds[stage] / len(arrivals)
        heapq.heappush(waiting, (free[home], unit, stage + 1))
    return np.sort(ends)
