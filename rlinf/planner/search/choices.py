"""A way to run one node, and tables of such ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlinf.planner.search.formulas import Floats, Form, single_node
from rlinf.planner.search.options import Integers, NodeSource, Options

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodePlacement:
    """One way to run a node.

    Args:
        node: Name of the node.
        components: Its components, in the order of its stages.
        blocks: Indices of stages, by the devices that they share.
        kinds: Index of the kind of device, per block.
        sizes: Devices, per block.
        stages: Sub-batches in flight inside a loop.
        resident: Components that keep their memory while it is idle.
    """

    node: str
    components: tuple[str, ...]
    blocks: Blocks
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    stages: int
    resident: frozenset[str]


@dataclass(frozen=True)
class PlacementGrid:
    """Choices that differ only in their sizes, made when they are asked for."""

    template: NodePlacement
    sizes: tuple[Integers, ...]

    def __getitem__(self, index: int) -> NodePlacement:
        return replace(self.template, sizes=tuple(int(column[index]) for column in self.sizes))


@dataclass(frozen=True)
class NodeOptions:
    """Undominated ways to run a node in chunks of one granularity.

    With N ways and K kinds of devices:

    Args:
        devices: [N, K] devices in use, with gaps that keep processes on their nodes.
        chunk: [N] time per chunk [s].
        switch: [N] time that is spent once: to load, to offload, and before results come [s].
        peak: [N, K] memory of one device while the node runs [bytes].
        idle: [N, K] memory of one device while it does not [bytes].
        grid: [N] index into ``grids``.
        index: [N] index into that grid.
        grids: The choices.
    """

    devices: Integers
    chunk: Floats
    switch: Floats
    peak: Floats
    idle: Floats
    grid: Integers
    index: Integers
    grids: tuple[PlacementGrid, ...]

    def options(self, form: Form, chunks: int) -> Options:
        """The ways as a part of a flow, in one form, for a number of chunks of a step."""
        return Options(
            devices=self.devices,
            stream=single_node(form, self.chunk, self.switch, chunks),
            peak=self.peak,
            idle=self.idle,
            source=self.grid,
            left=self.index,
            right=np.zeros_like(self.index),
            sources=tuple(NodeSource(grid) for grid in self.grids),
        )

    def take(self, indices: Integers) -> NodeOptions:
        """The ways at some indices."""
        return NodeOptions(
            self.devices[indices],
            self.chunk[indices],
            self.switch[indices],
            self.peak[indices],
            self.idle[indices],
            self.grid[indices],
            self.index[indices],
            self.grids,
        )
