"""Placement of all components of a program, from ``cluster.component_placement``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from rlinf.scheduler.component_grammar import PlacementEntry, parse_component_placement
from rlinf.scheduler.errors import PlacementError
from rlinf.scheduler.node import NodeTable
from rlinf.scheduler.placement import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PlacementStrategy,
    find_node_groups,
)

T = TypeVar("T")


class ComponentPlacement:
    """Reads ``config.cluster.component_placement`` against the hardware of a cluster.

    ``config`` is a mapping, or an object with these attributes. Components of one entry share one
    strategy object. Where a selected node group has no hardware, resources are nodes; otherwise
    they are devices, robots or CPU slots.

    Raises:
        PlacementError: The text is malformed, or the cluster does not have what it names. It is
            also an ``AssertionError``.
    """

    def __init__(self, config: Any, cluster: NodeTable) -> None:
        self._config = config
        self._placement_mode: Enum | None = None
        self._placements: dict[str, PlacementStrategy] = {}
        self._process_resources: dict[str, list[tuple[int, ...]]] = {}
        for entry in parse_component_placement(_component_placement_of(config)):
            strategy, processes = _resolve(entry, cluster)
            for name in entry.components:
                self._placements[name] = strategy
                self._process_resources[name] = processes

    @property
    def placement_mode(self) -> Enum | None:
        """How the components relate, where a subclass decides it."""
        return self._placement_mode

    @property
    def components(self) -> list[str]:
        """Names of the components, in the order of the configuration."""
        return list(self._process_resources)

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Placement of a component, to be given to ``launch``.

        Raises:
            PlacementError: There is no such component; so from the methods below.
        """
        return self._of(component_name, self._placements)

    def get_world_size(self, component_name: str) -> int:
        """Number of processes of a component."""
        return len(self.get_process_resources(component_name))

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Resource ranks of a component, ascending."""
        processes = self.get_process_resources(component_name)
        return sorted({rank for ranks in processes for rank in ranks})

    def get_process_resources(self, component_name: str) -> list[tuple[int, ...]]:
        """Resource ranks of each process of a component, by process rank."""
        return self._of(component_name, self._process_resources)

    def _of(self, name: str, found: Mapping[str, T]) -> T:
        if name in found:
            return found[name]
        near = difflib.get_close_matches(name, self.components, n=1)
        meant = f" Did you mean '{near[0]}'?" if near else ""
        raise PlacementError(
            f"Unknown component name: '{name}' does not exist in cluster.component_placement, "
            f"which places {self.components}.{meant}"
        )


def read_config(config: Any, path: str, default: Any = None) -> Any:
    """Value at a dotted path of mappings or attributes; ``default`` where the path ends early."""
    value = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is None:
            return default
    return value


def _component_placement_of(config: Any) -> Mapping[Any, Any]:
    placement = read_config(config, "cluster.component_placement")
    if isinstance(placement, DictConfig | ListConfig):
        placement = OmegaConf.to_container(placement, resolve=True)
    if not isinstance(placement, Mapping):
        raise PlacementError(
            "component_placement must be provided in the cluster config as a mapping of components "
            f"to placements, got {placement!r}. For example {{'actor,rollout': 'all'}}."
        )
    return placement


def _resolve(
    entry: PlacementEntry, cluster: NodeTable
) -> tuple[PlacementStrategy, list[tuple[int, ...]]]:
    groups = find_node_groups(cluster, entry.node_groups, entry.components)
    labels = [group.label for group in groups]
    by_node = any(group.hardware_type is None for group in groups)
    count = sum(len(g.nodes) if by_node else g.hardware_resource_count for g in groups)
    processes = entry.processes(count)
    if not by_node:
        return FlexiblePlacementStrategy(processes, labels), processes
    spread = next((ranks for ranks in processes if len(ranks) > 1), None)
    if spread is not None:
        raise PlacementError(
            f"component_placement['{','.join(entry.components)}'] = '{entry.spec}' gives one "
            f"process the nodes {list(spread)} of node groups {labels}, but a process runs on one "
            f"node. Nearest legal: one process per node, '{entry.spec.split(':')[0].strip()}'."
        )
    return NodePlacementStrategy([ranks[0] for ranks in processes], labels), processes
