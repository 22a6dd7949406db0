"""The shape of a cluster that need not exist: node groups, devices per node, kind and memory.

Written ``512x8:H100`` for 512 nodes of 8 H100; several groups follow each other after a comma, and
a memory per device may be given: ``4x8:H100,16x8:RTX4090/24GB``.
"""

from __future__ import annotations

import re

from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.nearest import nearest_names
from rlinf.errors import ConfigError

GIGABYTE = 10**9

CPU = "cpu"
"""Kind of devices that are shares of the cores of a machine."""

# Memory per device as its vendor states it [GB].
MEMORY_GB = {
    "A100": 80,
    "A800": 80,
    "H100": 80,
    "H800": 80,
    "H200": 141,
    "H20": 96,
    "B200": 180,
    "L40S": 48,
    "RTX4090": 24,
    "RTX4090D": 24,
}

_GROUP = re.compile(
    r"(?P<nodes>\d+)x(?P<devices>\d+)(:(?P<kind>[A-Za-z][\w-]*)(/(?P<memory>\d+(\.\d+)?)GB)?)?"
)


class NodeGroup(StrictModel):
    """Equal nodes."""

    nodes: int = Field(ge=1)
    """Number of nodes."""
    devices_per_node: int = Field(ge=1)
    """Devices of a node."""
    kind: str = ""
    """Kind of the devices, such as ``H100`` or ``cpu``; empty: the one that was measured."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Memory of a device; None: not limited."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        kind = f":{self.kind}" if self.kind else ""
        return f"{self.nodes}x{self.devices_per_node}{kind}"


class ClusterShape(StrictModel):
    """Node groups in the order in which their devices are numbered."""

    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    """Groups of nodes, each of another kind."""

    @property
    def devices(self) -> int:
        """Devices of all groups."""
        return sum(group.devices for group in self.groups)

    def offset(self, group: int) -> int:
        """Number of the first device of a group."""
        return sum(before.devices for before in self.groups[:group])

    def __str__(self) -> str:
        return ",".join(map(str, self.groups))


def parse_cluster_shape(text: str) -> ClusterShape:
    """Read a shape such as ``512x8:H100`` or ``4x8:H100,16x8:RTX4090/24GB``.

    A kind without a memory has the one that its vendor states; of an unknown kind, or without a
    kind, the memory is not limited.

    Raises:
        ConfigError: A group cannot be read, has no node or device, or repeats a kind.
    """
    groups = [_parse_group(part.strip(), text) for part in text.split(",")]
    kinds = [group.kind for group in groups]
    repeated = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"cluster '{text}' has two groups of {repeated or 'no kind'}; "
            "add up their nodes, or give each a kind of its own"
        )
    return ClusterShape(groups=tuple(groups))


def kind_name(text: str) -> str:
    """A kind of device as it is written here: ``H100`` for ``h100``; unknown ones as they are."""
    known = {name.upper(): name for name in (*MEMORY_GB, CPU)}
    return known.get(text.upper(), text)


def kind_of_model(model: str) -> str:
    """Kind of device of a vendor's model name: ``H100`` for ``NVIDIA H100 80GB HBM3``.

    Of a model that is not known here it is the name without its vendor, in letters that the kind of
    a shape can have; empty for a name without any.
    """
    words = model.replace(" ", "").upper()
    known = max((name for name in MEMORY_GB if name in words), key=len, default=None)
    if known is not None:
        return known
    name = re.sub(r"^(NVIDIA|AMD|Intel)\b|\bGeForce\b", "", model.strip(), flags=re.IGNORECASE)
    return re.sub(r"^[^A-Za-z]+|[^\w-]", "", name)


def _parse_group(part: str, text: str) -> NodeGroup:
    match = _GROUP.fullmatch(part)
    if match is None:
        where = f" in '{text}'" if part != text else ""
        raise ConfigError(
            f"cluster '{part}'{where} is not NODESxDEVICES[:KIND[/MEMORYGB]]; "
            "for 512 nodes of 8 H100 write 512x8:H100"
        )
    nodes, devices = int(match["nodes"]), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise ConfigError(
            f"cluster '{part}' has no device; nearest: {max(nodes, 1)}x{max(devices, 1)}"
        )
    kind = kind_name(match["kind"] or "")
    memory = float(match["memory"]) if match["memory"] else MEMORY_GB.get(kind)
    if memory is not None and memory * GIGABYTE < 1:
        near = MEMORY_GB.get(kind, 80)
        raise ConfigError(
            f"cluster '{part}' gives a device no memory; nearest: {part.partition('/')[0]}/{near}GB"
        )
    if kind and memory is None and nearest_names(kind, MEMORY_GB):
        close = nearest_names(kind, MEMORY_GB)[0]
        raise ConfigError(
            f"cluster '{part}': the memory of {kind} is not known; did you mean {close}? "
            f"Otherwise give it: {part}/80GB"
        )
    return NodeGroup(
        nodes=nodes,
        devices_per_node=devices,
        kind=kind,
        memory_bytes=None if memory is None else int(memory * GIGABYTE),
    )
