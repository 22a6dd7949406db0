"""CPU slots: the cores of a machine without an accelerator, divided into devices.

A worker on a slot is pinned to its cores and computes with that many threads, so that placements
and leases mean the same on a laptop as on a machine with GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from rlinf.scheduler.errors import HardwareError

OVERSUBSCRIBE_VARIABLE = "RLINF_OVERSUBSCRIBE_CPU_SLOTS"

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> tuple[int, ...]:
    """Core numbers that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def divide_cores(cores: Sequence[int], slots: int) -> tuple[tuple[int, ...], ...]:
    """Divide ``cores`` into ``slots`` contiguous shares whose sizes differ by at most one.

    More slots than cores are a HardwareError, because workers on "different" devices would then
    compete. A test of placements on a small machine may want exactly that: with the environment
    variable ``RLINF_OVERSUBSCRIBE_CPU_SLOTS=1`` slots beyond the cores share them in turn.
    """
    if slots < 1:
        raise HardwareError(
            f"cpu_devices_per_node must be 1 or more, got {slots}: a node is divided into that "
            "many devices. Leave it out to treat the node as one resource."
        )
    if slots <= len(cores):
        size, larger = divmod(len(cores), slots)
        starts = [rank * size + min(rank, larger) for rank in range(slots + 1)]
        return tuple(tuple(cores[a:b]) for a, b in pairwise(starts))
    if os.environ.get(OVERSUBSCRIBE_VARIABLE) == "1":
        return tuple((cores[rank % len(cores)],) for rank in range(slots))
    raise HardwareError(
        f"cpu_devices_per_node is {slots}, but this process may use {len(cores)} cores and a slot "
        f"is at least one core; the largest legal value is {len(cores)}. To let slots share cores "
        f"(for tests, never for timing), set {OVERSUBSCRIBE_VARIABLE}=1."
    )


def thread_environment(cores: Sequence[int]) -> dict[str, str]:
    """Variables that make numerical libraries of a new process use as many threads as cores."""
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, len(cores))))
