"""The macro flow: what happens in one training step, as a graph of stages.

A :class:`Flow` names components and methods, never devices or processes, so the same graph is
executed, profiled, planned and drawn. Edges are matched by name: a stage that lists
``"trajectories"`` among its outputs feeds the one stage that lists it among its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rlinf.errors import ConfigError

Route = Literal["shard", "replicate"]


@dataclass(frozen=True)
class Stage:
    """One stream transformer: a method that every worker of a component runs.

    The method takes one iterator per input edge and yields :class:`~rlinf.flow.stream.Emit`.
    """

    component: str  # name of the worker group that runs the stage
    method: str  # method of its worker class
    inputs: tuple[str, ...] = ()
    """Edges it consumes, in the order of the method's positional arguments."""
    outputs: tuple[str, ...] = ()  # edges it may yield to
    replicated: tuple[str, ...] = ()
    """Input edges of which every worker receives every item; the items of the others are sharded
    over the workers by their source."""
    key: str | None = None
    """Name of its arguments and reports; None: the component's, which then has one stage."""

    @property
    def label(self) -> str:
        """Name of its arguments and reports."""
        return self.key or self.component

    def route(self, edge: str) -> Route:
        """How the items of an input edge are spread over this stage's workers."""
        return "replicate" if edge in self.replicated else "shard"


@dataclass(frozen=True)
class Node:
    """What is scheduled as one: a single stage, or a loop of stages that feed each other."""

    name: str
    stages: tuple[Stage, ...]
    ahead: bool = False
    """Whether it may run before the nodes of earlier steps that do not run ahead have ended, as a
    rollout may before the training phases that are to come."""

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups that the node occupies."""
        return tuple(stage.component for stage in self.stages)

    @property
    def is_loop(self) -> bool:
        """Whether its stages feed each other, with an inner pipeline."""
        return len(self.stages) > 1


@dataclass(frozen=True)
class Edge:
    """A stream of items from one stage to another."""

    name: str
    producer: Stage
    consumer: Stage
    route: Route


@dataclass
class Flow:
    """A training step as a graph of stages; its name is that of channels and timelines."""

    name: str
    nodes: list[Node] = field(default_factory=list)

    def stage(self, name: str, stage: Stage, *, ahead: bool = False) -> Node:
        """Add a single stage; ``ahead`` as in :class:`Node`."""
        return self._add(Node(name, (stage,), ahead))

    def loop(self, name: str, *stages: Stage, ahead: bool = False) -> Node:
        """Add stages that feed each other, such as environment and policy.

        To the planner a loop is one node with an inner pipeline. ``ahead`` as in :class:`Node`.
        """
        if len(stages) < 2:
            raise ConfigError(f"flow '{self.name}': loop '{name}' needs two or more stages")
        return self._add(Node(name, stages, ahead))

    def _add(self, node: Node) -> Node:
        if any(node.name == other.name for other in self.nodes):
            raise ConfigError(f"flow '{self.name}': two nodes are called '{node.name}'")
        taken = Counter(stage.label for other in (*self.nodes, node) for stage in other.stages)
        label, count = taken.most_common(1)[0]
        if count > 1:
            raise ConfigError(
                f"flow '{self.name}': two stages are called '{label}'; give one a key of its own"
            )
        self.nodes.append(node)
        return node

    def stages(self) -> Iterator[tuple[Node, Stage]]:
        """Every stage with its node, in the order they were added."""
        for node in self.nodes:
            for stage in node.stages:
                yield node, stage

    def edges(self) -> list[Edge]:
        """The streams between stages.

        Raises:
            ConfigError: If an edge has no producer, no consumer, or more than one of either.
        """
        stages = [stage for _, stage in self.stages()]
        outputs = [name for stage in stages for name in stage.outputs]
        edges = []
        for name in dict.fromkeys([*outputs, *(name for s in stages for name in s.inputs)]):
            sources = [stage for stage in stages for output in stage.outputs if output == name]
            targets = [stage for stage in stages for used in stage.inputs if used == name]
            if len(sources) != 1 or len(targets) != 1:
                raise ConfigError(
                    f"flow '{self.name}': edge '{name}' has {len(sources)} producers and "
                    f"{len(targets)} consumers; it needs one of each"
                )
            edges.append(Edge(name, sources[0], targets[0], targets[0].route(name)))
        return edges

    def feeds(self) -> dict[str, tuple[str, ...]]:
        """Names of the nodes that feed each node, itself left out, each once."""
        home = {id(stage): node.name for node, stage in self.stages()}
        found: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for edge in self.edges():
            source, target = home[id(edge.producer)], home[id(edge.consumer)]
            if source != target and source not in found[target]:
                found[target].append(source)
        return {name: tuple(sources) for name, sources in found.items()}

    def order(self) -> list[Node]:
        """Nodes in an order in which each comes after all that feed it.

        Raises:
            ConfigError: If nodes feed each other in a circle outside a loop node.
        """
        feeds = self.feeds()
        ordered: list[Node] = []
        while len(ordered) < len(self.nodes):
            done = {node.name for node in ordered}
            ready = [n for n in self.nodes if n.name not in done and done.issuperset(feeds[n.name])]
            if not ready:
                stuck = sorted(set(feeds) - done)
                raise ConfigError(
                    f"flow '{self.name}': {', '.join(stuck)} feed each other in a circle; "
                    "declare them as one loop"
                )
            ordered.append(ready[0])
        return ordered
