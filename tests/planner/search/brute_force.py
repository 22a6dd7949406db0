"""Every plan of a small flow, one by one, valued with scalars: what the planner must equal.

Nothing of the planner is used but the description of the problem. Streams are pairs and triples,
trees are built without memory of parts, nothing is dropped before the end, and a loop is played
exchange by exchange.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Way:
    """One way to run a node: devices, time of a chunk by granularity, switch, memory.

    Devices, and memory of a device, are given for each kind of device.
    """

    devices: tuple[int, ...]
    chunk: dict[int, float]
    switch: float
    peak: tuple[float, ...]
    idle: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    devices: tuple[int, ...]
    peak: tuple[float, ...]
    idle: tuple[float, ...]
    stream: tuple  # closed: (T,); out: (first, tail); into: (first, head); through: see below


def fastest(ways, edges, items, granularities, devices, memory):
    """Least time of a step over all trees; infinite where nothing fits.

    ``ways`` has a list of ``Way`` per node, in the order of the flow; ``edges`` pairs of positions;
    ``devices``, and ``memory`` of a device, are those of each kind.
    """
    search = Everything(ways, edges, items, granularities, devices, memory)
    plans = search.plans(tuple(range(len(ways))), "closed", None)
    return min((plan.stream[0] for plan in plans), default=math.inf)


class Everything:
    def __init__(self, ways, edges, items, granularities, devices, memory):
        self.ways, self.edges, self.items = ways, edges, items
        self.granularities, self.devices, self.memory = granularities, devices, memory

    def plans(self, nodes, form, m):
        if len(nodes) == 1:
            return list(self.leaves(nodes[0], form, m))
        found = []
        for left, right in self.cuts(nodes):
            crossing = any((a, b) in self.edges for a in left for b in right)
            if max(left) < min(right):
                found += self.temporal(left, right, form, m)
            if crossing:
                for inner in self.granularities if form == "closed" else (m,):
                    found += self.spatial(left, right, form, inner)
            elif min(left) < min(right):
                found += self.side_by_side(left, right, form, m)
        return [p for p in found if self.fits(p)]

    def fits(self, plan):
        small = all(n <= most for n, most in zip(plan.devices, self.devices, strict=True))
        return small and all(b <= most for b, most in zip(plan.peak, self.memory, strict=True))

    def cuts(self, nodes):
        for size in range(1, len(nodes)):
            for left in itertools.combinations(nodes, size):
                right = tuple(n for n in nodes if n not in left)
                if not any((b, a) in self.edges for a in left for b in right):
                    yield left, right

    def leaves(self, node, form, m):
        for way in self.ways[node]:
            chunk = way.chunk.get(self.items if form == "closed" else m, math.inf)
            if not math.isfinite(chunk) or not self.fits(way):
                continue
            first = way.switch + chunk
            stream = {
                "closed": (first,),
                "out": (first, chunk),
                "into": (first, chunk),
                "through": ("even", first, chunk),
            }[form]
            yield Plan(way.devices, way.peak, way.idle, stream)

    def temporal(self, left, right, form, m):
        forms = {
            "closed": ("closed", "closed"),
            "out": ("closed", "out"),
            "into": ("into", "closed"),
            "through": ("into", "out"),
        }[form]
        for a, b in itertools.product(
            self.plans(left, forms[0], m), self.plans(right, forms[1], m)
        ):
            first = a.stream[0] + b.stream[0]
            if form == "closed":
                stream = (first,)
            elif form == "out":
                stream = (first, b.stream[1])
            elif form == "into":
                stream = (first, a.stream[1])
            else:
                stream = ("barrier", first, a.stream[1], b.stream[1])
            peak = each(max, each(add, a.peak, b.idle), each(add, b.peak, a.idle))
            devices = each(max, a.devices, b.devices)
            yield Plan(devices, peak, each(add, a.idle, b.idle), stream)

    def spatial(self, left, right, form, m):
        more = self.items // m - 1
        source = "through" if form in ("into", "through") else "out"
        target = "through" if form in ("out", "through") else "into"
        for a, b in itertools.product(self.plans(left, source, m), self.plans(right, target, m)):
            yield self.beside(a, b, connect(a.stream, b.stream, form, more))

    def side_by_side(self, left, right, form, m):
        for a, b in itertools.product(self.plans(left, form, m), self.plans(right, form, m)):
            if form != "through":
                stream = tuple(max(x, y) for x, y in zip(a.stream, b.stream, strict=True))
            elif a.stream[0] == b.stream[0] == "even":
                stream = ("even", *(max(a.stream[i], b.stream[i]) for i in (1, 2)))
            else:
                x, y = ((*s, s[2])[:4] for s in (a.stream, b.stream))
                stream = ("barrier", *(max(x[i], y[i]) for i in (1, 2, 3)))
            yield self.beside(a, b, stream)

    @staticmethod
    def beside(a, b, stream):
        peak, idle = each(max, a.peak, b.peak), each(max, a.idle, b.idle)
        return Plan(each(add, a.devices, b.devices), peak, idle, stream)


def each(combine, one, other):
    """What is combined kind by kind."""
    return tuple(combine(a, b) for a, b in zip(one, other, strict=True))


def connect(source, target, form, more):
    """A stream into another, by cases; ``more`` chunks follow the first."""
    if form == "closed":
        return (source[0] + target[0] + more * max(source[1], target[1]),)
    if form == "out":
        if target[0] == "even":
            return (source[0] + target[1], max(source[1], target[2]))
        return (source[0] + target[1] + more * max(source[1], target[2]), target[3])
    if form == "into":
        if source[0] == "even":
            return (source[1] + target[0], max(source[2], target[1]))
        return (source[1] + target[0] + more * max(source[3], target[1]), source[2])
    first = source[1] + target[1]
    if source[0] == "even" and target[0] == "even":
        return ("even", first, max(source[2], target[2]))
    if source[0] == "even":
        return ("barrier", first, max(source[2], target[2]), target[3])
    if target[0] == "even":
        return ("barrier", first, source[2], max(source[3], target[2]))
    return ("barrier", first + more * max(source[3], target[2]), source[2], target[3])


def play_loop(seconds, homes, exchanges, stages):
    """Time of a loop of stages, sub-batch by sub-batch, each device serving who came first.

    ``homes`` names the devices of each stage.
    """
    parts = [s / (exchanges * stages) for s in seconds]
    free = dict.fromkeys(homes, 0.0)
    waiting = [(0.0, sub, 0, 0) for sub in range(stages)]  # ready, sub-batch, exchange, stage
    end = 0.0
    while waiting:
        waiting.sort()
        ready, sub, exchange, stage = waiting.pop(0)
        end = max(ready, free[homes[stage]]) + parts[stage]
        free[homes[stage]] = end
        stage += 1
        if stage == len(parts):
            stage, exchange = 0, exchange + 1
        if exchange < exchanges:
            waiting.append((end, sub, exchange, stage))
    return max(free.values())
