"""How many threads decode on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_SMALL = 10_000_000


def threads_for(model: nn.Module) -> int:
    """One for a small model; those of this thread for others.

    A decoding step of a small model is a hundred operations of a few microseconds. Rollout and
    trainer each have threads to compute with; where these are more than cores, OpenMP lets the idle
    ones sleep, and waking them for each operation doubles the time of a step.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    return 1 if small else torch.get_num_threads()


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Compute with so many threads; those of this thread are as before when it ends."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
