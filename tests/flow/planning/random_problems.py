"""Random small flows with a table of times, for the planner and for trying everything."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rlinf.flow.cluster_shape import ClusterShape, NodeGroup
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.planning import ComponentConstraint, Constraints
from rlinf.flow.profile import ComponentProfile, Measurement, Profile
from tests.flow.planning.brute_force import Way, play_loop


@dataclass(frozen=True)
class RandomProblem:
    flow: Flow
    profile: Profile
    cluster: ClusterShape
    constraints: Constraints
    ways: list[list[Way]]
    edges: set[tuple[int, int]]


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def random_problem(rng, nodes, *, chain=False, memory=True):
    devices = int(rng.integers(2, 7))
    items = int(rng.choice([4, 6] if nodes == 4 else [4, 6, 8, 12]))
    loops = [nodes < 4 and rng.random() < 0.2 for _ in range(nodes)]
    edges = {(i - 1 if chain else int(rng.integers(0, i)), i) for i in range(1, nodes)}
    if not chain and nodes > 2 and rng.random() < 0.5:
        a, b = sorted(rng.choice(nodes, 2, replace=False).tolist())
        edges.add((a, b))
    flow = make_flow(nodes, edges, loops)
    components, limits, exchanges = {}, {}, {}
    ways = []
    for i, node in enumerate(flow.nodes):
        makers = [Component(rng, name, items, devices, nodes) for name in node.components]
        for maker in makers:
            components[maker.name] = maker.profile()
            limits[maker.name] = maker.limits
        if loops[i]:
            exchanges[node.name] = int(rng.integers(1, 4))
        ways.append(list(node_ways(makers, items, exchanges.get(node.name, 1), devices)))
    limit = int(rng.integers(40, 120)) if memory and rng.random() < 0.7 else None
    return RandomProblem(
        flow,
        Profile(hardware="table", model="none", config="none", components=components),
        ClusterShape(groups=(NodeGroup(nodes=1, devices_per_node=devices, memory_bytes=limit),)),
        Constraints(items=items, exchanges=exchanges, components=limits),
        ways,
        edges,
    )


def make_flow(nodes, edges, loops):
    flow = Flow("random")
    for i in range(nodes):
        inputs = tuple(f"{a}to{b}" for a, b in sorted(edges) if b == i)
        outputs = tuple(f"{a}to{b}" for a, b in sorted(edges) if a == i)
        if loops[i]:
            first = Stage(f"env{i}", "run", (*inputs, f"back{i}"), (*outputs, f"forth{i}"))
            second = Stage(f"policy{i}", "run", (f"forth{i}",), (f"back{i}",))
            flow.loop(f"n{i}", first, second)
        else:
            flow.stage(f"n{i}", Stage(f"c{i}", "run", inputs, outputs))
    return flow


class Component:
    """Random times for every size, random limits."""

    def __init__(self, rng, name, items, devices, nodes):
        self.name, self.items = name, items
        self.concurrent = name.startswith("c") and rng.random() < 0.2
        counts = divisors(items)
        keep = 2 if nodes == 4 else 3
        legal = sorted(rng.choice(counts, min(keep, len(counts)), replace=False).tolist())
        residency = [None, "offload", "resident"][int(rng.choice(3, p=[0.6, 0.2, 0.2]))]
        if nodes == 4:
            residency = residency or "resident"
        self.stages = (1, 2) if name.startswith(("env", "policy")) else (1,)
        self.limits = ComponentConstraint(
            processes=tuple(legal),
            streams=bool(rng.random() < 0.8),
            residency=residency,
            pipeline_stages=self.stages,
        )
        self.switch = (float(rng.uniform(0, 3)), float(rng.uniform(0, 3)))
        self.resident_bytes = int(rng.integers(0, 40))
        self.devices = devices
        self.share = float(rng.choice([0.0, 0.4])) if self.concurrent else 0.0
        scale = float(rng.uniform(1, 10))
        self.seconds, self.bytes = {}, {}
        for m, n, s in itertools.product(counts, range(1, devices + 1), self.stages):
            mean = scale * (0.2 + m / n**0.8)
            self.seconds[m, n, s] = float(mean * rng.uniform(0.5, 2))
            self.bytes[m, n, s] = self.resident_bytes + int(rng.integers(0, 60))

    def profile(self):
        return ComponentProfile(
            measurements=tuple(
                Measurement(
                    items=m,
                    devices=n,
                    pipeline_stages=s,
                    seconds=seconds,
                    peak_bytes=self.bytes[m, n, s],
                    origin="random",
                )
                for (m, n, s), seconds in self.seconds.items()
            ),
            onload_seconds=self.switch[0],
            offload_seconds=self.switch[1],
            resident_bytes=self.resident_bytes,
            concurrent=self.concurrent,
            first_result_share=self.share,
        )

    def sizes(self):
        return [n for n in self.limits.processes if n <= self.devices]

    def time(self, m, n, s):
        """Time of a chunk, or None where ``n`` processes cannot share it evenly."""
        if m < self.items and not self.limits.streams:
            return None
        seen = self.items if self.concurrent else m
        if seen % s or (seen // s) % n:
            return None
        return (1 - self.share) * self.seconds[seen, n, s] * m / seen


def node_ways(makers, items, exchanges, devices):
    pinned = {mk.name for mk in makers if mk.limits.residency == "resident"}
    free = {mk.name for mk in makers if mk.limits.residency is None}
    for resident in [pinned | free, pinned] if free else [pinned]:
        for sizes, homes, s in divisions(makers):
            chunk = {}
            for m in divisors(items):
                times = [mk.time(m, n, s) for mk, n in zip(makers, sizes, strict=True)]
                if None not in times:
                    chunk[m] = (
                        play_loop(times, homes, exchanges, s) if len(makers) > 1 else times[0]
                    )
            peaks, idles = {}, {}
            for mk, n, home in zip(makers, sizes, homes, strict=True):
                peaks[home] = peaks.get(home, 0) + mk.bytes[items, n, s]
                idles[home] = idles.get(home, 0) + mk.resident_bytes * (mk.name in resident)
            used = sum(dict(zip(homes, sizes, strict=True)).values())
            away = [mk for mk in makers if mk.name not in resident]
            loading = sum(max((mk.switch[i] for mk in away), default=0.0) for i in (0, 1))
            lead = max(
                mk.share * mk.seconds[items, n, s] for mk, n in zip(makers, sizes, strict=True)
            )
            if used <= devices:
                yield Way(used, chunk, lead + loading, max(peaks.values()), max(idles.values()))


def divisions(makers):
    if len(makers) == 1:
        for n in makers[0].sizes():
            yield (n,), (0,), 1
        return
    a, b = makers
    for s in (1, 2):
        for n in set(a.sizes()) & set(b.sizes()):
            yield (n, n), (0, 0), s
        for n, m in itertools.product(a.sizes(), b.sizes()):
            yield (n, m), (0, 1), s
