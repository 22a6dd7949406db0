"""Memory of the machine; memory and kind of the devices that a placement can name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlinf.flow.placed_config import PlacedConfig, accelerators_here
from rlinf.planner.cluster_shape import CPU, GIGABYTE, MEMORY_GB, kind_of_model
from rlinf.scheduler.accelerators import accelerator_model, installed_accelerators

_SIZE = re.compile(r"\b(\d+) ?GB\b")


def free_memory() -> int:
    """What new processes can have: the free memory of the machine, or of its control group."""
    left = [limit - used for limit, used in _control_groups()]
    return min([psutil.virtual_memory().available, *left])


def device_memory(config: PlacedConfig) -> int | None:
    """Memory of one device of a recipe's cluster, whose nodes are as this machine [bytes].

    A CPU slot has its share of the host. None where it is not known: accelerators that are
    described and not here, or of a model of which nothing is known.
    """
    if config.on_accelerators:
        return _memory_of_model(_accelerator_model()) if accelerators_here() else None
    limits = [limit for limit, _ in _control_groups()]
    total = min([psutil.virtual_memory().total, *limits])
    return total // (config.devices // config.cluster.num_nodes)


def device_kind(config: PlacedConfig) -> str:
    """Kind of the devices of a recipe's cluster, whose nodes are as this machine.

    ``cpu`` for slots, and for nodes without accelerators. Empty for accelerators that are described
    and not here.
    """
    if not config.on_accelerators:
        return CPU
    return kind_of_model(_accelerator_model()) if accelerators_here() else ""


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and use of the control groups that this process is in [bytes]."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((root / most).read_text("ascii"))
                yield limit, int((root / used).read_text("ascii"))
            except (OSError, ValueError):
                continue  # no such group, or no limit


def _accelerator_model() -> str:
    kind, _ = installed_accelerators()
    return accelerator_model(kind)


def _memory_of_model(model: str) -> int | None:
    """Memory that a model's name states, or its vendor for it [bytes]."""
    size = _SIZE.search(model)
    if size is not None:
        return int(size[1]) * GIGABYTE
    known = MEMORY_GB.get(kind_of_model(model))
    return None if known is None else known * GIGABYTE
