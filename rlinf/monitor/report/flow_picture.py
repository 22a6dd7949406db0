"""The flow of a run as a picture: nodes in the order of their data, loops as one box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

BOX_WIDTH, BOX_HEIGHT = 168, 62
_GAP, _COLUMN, _MARGIN, _HEAD = 56, 148, 14, 26


@dataclass(frozen=True)
class StageBox:
    """One stage: its name in the flow, its component and the method that it runs."""

    label: str
    component: str
    method: str


@dataclass(frozen=True)
class NodeBox:
    """One node: a stage, or a loop of stages that feed each other."""

    name: str
    stages: tuple[StageBox, ...]


@dataclass(frozen=True)
class Arrow:
    """A stream of items from one stage to another, by their names."""

    name: str
    producer: str
    consumer: str


@dataclass(frozen=True)
class Graph:
    """Nodes, each after all that feed it, and the streams between their stages."""

    nodes: tuple[NodeBox, ...]
    arrows: tuple[Arrow, ...]

    @property
    def components(self) -> tuple[str, ...]:
        """Components in the order of the graph."""
        return tuple(dict.fromkeys(s.component for node in self.nodes for s in node.stages))

    @property
    def homes(self) -> dict[str, str]:
        """Node of each stage."""
        return {stage.label: node.name for node in self.nodes for stage in node.stages}


def draw_graph(
    graph: Graph, colors: Mapping[str, str], captions: Mapping[str, str] | None = None
) -> str:
    """The graph as an SVG element; colours of text and lines come from the page.

    ``colors`` and ``captions`` (a line such as where it runs) are those of each component.
    """
    columns = _columns(graph)
    places = {
        stage.label: (_x(column), _HEAD + _MARGIN + row * (BOX_HEIGHT + _GAP))
        for column, nodes in enumerate(columns)
        for row, stage in enumerate(stage for node in nodes for stage in node.stages)
    }
    rows = max((sum(len(node.stages) for node in nodes) for nodes in columns), default=0)
    width = _x(len(columns)) - _COLUMN + 2 * _MARGIN
    height = _HEAD + 2 * _MARGIN + rows * (BOX_HEIGHT + _GAP) - _GAP + _MARGIN
    parts = [_loop(node, places) for node in graph.nodes if len(node.stages) > 1]
    home = graph.homes
    parts += [_inner(a, places) for a in graph.arrows if home[a.producer] == home[a.consumer]]
    parts += _outer([a for a in graph.arrows if home[a.producer] != home[a.consumer]], places)
    parts += [
        _box(stage, places[stage.label], colors, captions or {})
        for node in graph.nodes
        for stage in node.stages
    ]
    return (
        f'<svg class="graph" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="flow of a training step"><defs><marker id="tip" '
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>{"".join(parts)}'
        "</svg>"
    )


def _columns(graph: Graph) -> list[list[NodeBox]]:
    """Nodes by the length of the longest path that leads to them."""
    home = graph.homes
    depth = {node.name: 0 for node in graph.nodes}
    for node in graph.nodes:  # each comes after all that feed it
        for arrow in graph.arrows:
            source, target = home[arrow.producer], home[arrow.consumer]
            if target == node.name and source != target:
                depth[target] = max(depth[target], depth[source] + 1)
    columns: list[list[NodeBox]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for node in graph.nodes:
        columns[depth[node.name]].append(node)
    return columns


def _x(column: int) -> int:
    return 2 * _MARGIN + column * (BOX_WIDTH + _COLUMN)


def _loop(node: NodeBox, places: Mapping[str, tuple[int, int]]) -> str:
    """A frame around the stages of a loop."""
    x, top = places[node.stages[0].label]
    bottom = places[node.stages[-1].label][1] + BOX_HEIGHT
    return (
        f'<rect class="loop" x="{x - _MARGIN}" y="{top - _HEAD}" '
        f'width="{BOX_WIDTH + 2 * _MARGIN}" height="{bottom - top + _HEAD + _MARGIN}" rx="10"/>'
        f'<text class="small" x="{x}" y="{top - 10}">loop: {escape(node.name)}</text>'
    )


def _box(
    stage: StageBox,
    place: tuple[int, int],
    colors: Mapping[str, str],
    captions: Mapping[str, str],
) -> str:
    x, y = place
    caption = captions.get(stage.component, "")
    return (
        f'<g><rect class="stage" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<rect x="{x}" y="{y}" width="6" height="{BOX_HEIGHT}" rx="3" '
        f'fill="{colors[stage.component]}"/>'
        f'<text class="name" x="{x + 16}" y="{y + 21}">{escape(stage.label)}</text>'
        f'<text class="small" x="{x + 16}" y="{y + 37}">{escape(stage.method)}</text>'
        f'<text class="small" x="{x + 16}" y="{y + 53}">{escape(caption)}</text></g>'
    )


def _inner(arrow: Arrow, places: Mapping[str, tuple[int, int]]) -> str:
    """Down on the left, up on the right."""
    (x, source), (_, target) = places[arrow.producer], places[arrow.consumer]
    down = target > source
    at = x + (46 if down else BOX_WIDTH - 46)
    begin, end = (source + BOX_HEIGHT, target) if down else (source, target + BOX_HEIGHT)
    side = f'x="{at - 6}" text-anchor="end"' if down else f'x="{at + 6}"'
    # Names longer than the room beside the line are centred in the gap, above each other.
    middle = (begin + end) / 2 + (-6 if down else 12)
    if len(arrow.name) > 6:
        side = f'x="{x + BOX_WIDTH / 2}" text-anchor="middle"'
    return (
        f'<path class="arrow" marker-end="url(#tip)" d="M{at} {begin}V{end}"/>'
        f'<text class="edge" {side} y="{middle}">{escape(arrow.name)}</text>'
    )


def _outer(arrows: Sequence[Arrow], places: Mapping[str, tuple[int, int]]) -> list[str]:
    drawn = []
    for number, arrow in enumerate(arrows):
        (x, y), (target_x, target_y) = places[arrow.producer], places[arrow.consumer]
        into = [other for other in arrows if other.consumer == arrow.consumer]
        share = (into.index(arrow) + 1) / (len(into) + 1)
        begin, end = (x + BOX_WIDTH, y + BOX_HEIGHT / 2), (target_x, target_y + share * BOX_HEIGHT)
        bend = (end[0] - begin[0]) / 2
        middle = ((begin[0] + end[0]) / 2 + _MARGIN / 2, (begin[1] + end[1]) / 2 - 6 - 2 * number)
        drawn.append(
            f'<path class="arrow" marker-end="url(#tip)" d="M{begin[0]} {begin[1]}C'
            f"{begin[0] + bend} {begin[1]} {end[0] - bend} {end[1]} {end[0]} {end[1]}"
            '"/>'
            f'<text class="edge" text-anchor="middle" x="{middle[0]}" y="{middle[1]}">'
            f"{escape(arrow.name)}</text>"
        )
    return drawn
