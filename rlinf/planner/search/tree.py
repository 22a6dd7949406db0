"""A plan as a tree of compositions: reading it back, laying it out on devices, valuing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rlinf.planner.search.choices import NodePlacement
from rlinf.planner.search.formulas import PARTS, Form, Kind, Stream, compose, single_node
from rlinf.planner.search.node_options import block_order
from rlinf.planner.search.options import NodeSource, Options
from rlinf.planner.search.problem import Problem

# Time per chunk and time of the switch of a placement, for a number of items [s].
Pricing = Callable[[NodePlacement, int], tuple[float, float]]


@dataclass(frozen=True)
class NodeTree:
    """One node, run in one way, in chunks of ``granularity`` items."""

    placement: NodePlacement
    granularity: int


@dataclass(frozen=True)
class JoinTree:
    """Two parts, composed."""

    kind: Kind
    granularity: int
    left: Tree
    right: Tree


Tree = NodeTree | JoinTree


def read_tree(options: Options, index: int, items: int, form: Form = "closed") -> Tree:
    """The tree of one option.

    Args:
        options: Options of a part.
        index: Which of them.
        items: Items of a step, the granularity of what is not a stream.
        form: Form of the part.
    """
    return _read(options, index, items, items, form)


def _read(options: Options, index: int, granularity: int, items: int, form: Form) -> Tree:
    source = options.sources[options.source[index]]
    if isinstance(source, NodeSource):
        return NodeTree(source.placements[int(options.left[index])], granularity)
    forms = PARTS[source.kind, form]
    chosen = (int(options.left[index]), int(options.right[index]))
    left, right = (
        _read(part, i, items if f == "closed" else source.granularity, items, f)
        for part, i, f in zip((source.left, source.right), chosen, forms, strict=True)
    )
    return JoinTree(source.kind, source.granularity, left, right)


def node_trees(tree: Tree) -> Iterator[NodeTree]:
    """All nodes of a tree, from left to right."""
    if isinstance(tree, NodeTree):
        yield tree
    else:
        yield from node_trees(tree.left)
        yield from node_trees(tree.right)


def value(tree: Tree, pricing: Pricing, items: int, *, overlap: float = 1.0) -> float:
    """Time of a step by the formulas of :mod:`rlinf.planner.search.formulas` [s].

    ``overlap`` is :attr:`~rlinf.planner.search.problem.Problem.overlap`.
    """
    factor = overlap if isinstance(tree, JoinTree) and tree.kind == "parallel" else 1.0
    return factor * float(_value(tree, pricing, items, "closed").first[0])


def _value(tree: Tree, pricing: Pricing, items: int, form: Form) -> Stream:
    if isinstance(tree, NodeTree):
        chunk, switch = pricing(tree.placement, tree.granularity)
        chunks = items // tree.granularity
        return single_node(form, np.array([chunk]), np.array([switch]), chunks)
    left, right = (
        _value(part, pricing, items, part_form)
        for part, part_form in zip((tree.left, tree.right), PARTS[tree.kind, form], strict=True)
    )
    return compose(tree.kind, form, left, right, items // tree.granularity)


Layout = dict[str, tuple[int, ...]]


def layout(tree: Tree, problem: Problem) -> Layout:
    """Devices of each component, numbered over the whole cluster.

    Parts that take turns begin at the same device; parts side by side follow each other, the one
    with the larger replicas first, so that none crosses two nodes.
    """
    found: Layout = {}
    _place(tree, problem, [0] * len(problem.cluster.groups), found)
    return found


def _place(tree: Tree, problem: Problem, begin: list[int], found: Layout) -> list[int]:
    """Place a tree from a device of each kind on; return the device after it, of each kind."""
    if isinstance(tree, NodeTree):
        return _place_choice(tree.placement, problem, begin, found)
    parts, aligned = (
        [tree.left, tree.right],
        [_alignment(p, problem) for p in (tree.left, tree.right)],
    )
    if tree.kind == "temporal":
        ends = [_place(part, problem, begin, found) for part in parts]
        return [max(end) for end in zip(*ends, strict=True)]
    order = (1, 0) if aligned[1] > aligned[0] else (0, 1)
    end = _place(parts[order[0]], problem, begin, found)
    unit = aligned[order[1]]
    start = [b + -(-(e - b) // unit) * unit for b, e in zip(begin, end, strict=True)]
    last = _place(parts[order[1]], problem, start, found)
    return [e if n == s else n for e, s, n in zip(end, start, last, strict=True)]


def _place_choice(
    placement: NodePlacement, problem: Problem, begin: list[int], found: Layout
) -> list[int]:
    end = list(begin)
    for position in block_order(problem, placement.components, placement.blocks):
        names = [placement.components[i] for i in placement.blocks[position]]
        kind, size = placement.kinds[position], placement.sizes[position]
        unit = problem.alignment(names)
        start = begin[kind] + -(-(end[kind] - begin[kind]) // unit) * unit
        end[kind] = start + size
        offset = problem.cluster.offset(kind)
        for name in names:
            found[name] = tuple(range(offset + start, offset + end[kind]))
    return end


def _alignment(tree: Tree, problem: Problem) -> int:
    return problem.alignment([n for each in node_trees(tree) for n in each.placement.components])
