"""A cluster of two CPU slots, which the tests of a package share: starting Ray takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlinf.scheduler import Cluster


@contextmanager
def two_slots(runtime: str, *, deadline_seconds: float) -> Iterator[Cluster]:
    """One on ``runtime``, whose calls may take so long."""
    if runtime == "ray":
        pytest.importorskip("ray")
    environment = pytest.MonkeyPatch()
    environment.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    environment.delenv("RLINF_TIMEOUT", raising=False)
    started = Cluster(
        cluster_cfg={
            "num_nodes": 1,
            "runtime": runtime,
            "cpu_devices_per_node": 2,
            "timeout_minutes": deadline_seconds / 60,
        }
    )
    yield started
    started.shutdown()
    environment.undo()
