"""Random small flows with a table of times, for the planner and for trying everything."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rlinf.flow.graph import Flow, Stage
from rlinf.planner.cluster_shape import ClusterShape, NodeGroup
from rlinf.planner.profile import ComponentProfile, Measurement, Profile
from rlinf.planner.search import ComponentConstraint, Constraints
from tests.planner.search.brute_force import Way, play_loop

KINDS = ("H100", "RTX4090")


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


def random_problem(rng, nodes, *, chain=False, memory=True, kinds=1):
    """A problem of up to 6 devices; of several kinds also with items that belong together."""
    devices = [int(n) for n in rng.integers(2, 7 if kinds == 1 else 4, kinds)]
    items = int(rng.choice([4, 6] if nodes == 4 else [4, 6, 8, 12]))
    group = 1 if kinds == 1 else int(rng.choice(divisors(items)[:-1]))
    loops = [nodes < 4 and rng.random() < 0.2 for _ in range(nodes)]
    edges = {(i - 1 if chain else int(rng.integers(0, i)), i) for i in range(1, nodes)}
    if not chain and nodes > 2 and rng.random() < 0.5:
        a, b = sorted(rng.choice(nodes, 2, replace=False).tolist())
        edges.add((a, b))
    flow = make_flow(nodes, edges, loops)
    components, limits, exchanges = {}, {}, {}
    ways = []
    for i, node in enumerate(flow.nodes):
        makers = [Component(rng, n, items, devices, nodes, group) for n in node.components]
        for maker in makers:
            components[maker.name] = maker.profile()
            limits[maker.name] = maker.limits
        if loops[i]:
            exchanges[node.name] = int(rng.integers(1, 4))
        ways.append(list(node_ways(makers, items, exchanges.get(node.name, 1), devices)))
    groups = tuple(
        NodeGroup(
            nodes=1,
            devices_per_node=count,
            kind=KINDS[kind] if kinds > 1 else "",
            memory_bytes=int(rng.integers(40, 120)) if memory and rng.random() < 0.7 else None,
        )
        for kind, count in enumerate(devices)
    )
    return RandomProblem(
        flow,
        Profile(hardware="table", model="none", config="none", components=components),
        ClusterShape(groups=groups),
        Constraints(items=items, group_size=group, exchanges=exchanges, components=limits),
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
    """Random times for every size on every kind of device, random limits."""

    def __init__(self, rng, name, items, devices, nodes, group):
        self.name, self.items, self.group = name, items, group
        self.concurrent = name.startswith("c") and rng.random() < 0.2
        counts = divisors(items)
        keep = 2 if nodes == 4 else 3
        legal = sorted(rng.choice(counts, min(keep, len(counts)), replace=False).tolist())
        residency = [None, "offload", "resident"][int(rng.choice(3, p=[0.6, 0.2, 0.2]))]
        if nodes == 4:
            residency = residency or "resident"
        self.stages = (1, 2) if name.startswith(("env", "policy")) else (1,)
        self.devices, several = devices, len(devices) > 1
        kinds = [k for k in range(len(devices)) if not several or rng.random() < 0.7]
        self.kinds = kinds or [int(rng.integers(len(devices)))]
        # On the others it may not run, or was not measured.
        self.measured_everywhere = several and rng.random() < 0.5
        self.limits = ComponentConstraint(
            processes=tuple(legal),
            streams=bool(rng.random() < 0.8),
            residency=residency,
            pipeline_stages=self.stages,
            device_kinds=tuple(KINDS[k] for k in self.kinds) if self.measured_everywhere else (),
        )
        self.switch = (float(rng.uniform(0, 3)), float(rng.uniform(0, 3)))
        self.resident_bytes = int(rng.integers(0, 40))
        self.share = float(rng.choice([0.0, 0.4])) if self.concurrent else 0.0
        self.seconds, self.bytes = {}, {}
        for kind, most in enumerate(devices):
            scale = float(rng.uniform(1, 10))
            for m, n, s in itertools.product(counts, range(1, most + 1), self.stages):
                mean = scale * (0.2 + m / n**0.8)
                self.seconds[kind, m, n, s] = float(mean * rng.uniform(0.5, 2))
                self.bytes[kind, m, n, s] = self.resident_bytes + int(rng.integers(0, 60))

    def profile(self):
        return ComponentProfile(
            measurements=tuple(
                Measurement(
                    items=m,
                    devices=n,
                    pipeline_stages=s,
                    seconds=seconds,
                    peak_bytes=self.bytes[kind, m, n, s],
                    device_kind=KINDS[kind] if len(self.devices) > 1 else "",
                    origin="random",
                )
                for (kind, m, n, s), seconds in self.seconds.items()
                if kind in self.kinds or self.measured_everywhere
            ),
            onload_seconds=self.switch[0],
            offload_seconds=self.switch[1],
            resident_bytes=self.resident_bytes,
            concurrent=self.concurrent,
            first_result_share=self.share,
        )

    def sizes(self):
        """Kinds and numbers of devices."""
        return [(k, n) for k in self.kinds for n in self.limits.processes if n <= self.devices[k]]

    def time(self, m, size, s):
        """Time of a chunk, or None where so many processes cannot share its groups evenly."""
        kind, n = size
        if m < self.items and not self.limits.streams:
            return None
        seen = self.items if self.concurrent else m
        if seen % (s * self.group) or (seen // (s * self.group)) % n:
            return None
        return (1 - self.share) * self.seconds[kind, seen, n, s] * m / seen


def node_ways(makers, items, exchanges, devices):
    pinned = {mk.name for mk in makers if mk.limits.residency == "resident"}
    free = {mk.name for mk in makers if mk.limits.residency is None}
    for resident in [pinned | free, pinned] if free else [pinned]:
        for sizes, homes, s in divisions(makers):
            chunk = {}
            for m in divisors(items):
                times = [mk.time(m, size, s) for mk, size in zip(makers, sizes, strict=True)]
                if None not in times:
                    chunk[m] = (
                        play_loop(times, homes, exchanges, s) if len(makers) > 1 else times[0]
                    )
            peaks, idles = {}, {}
            for mk, (kind, n), home in zip(makers, sizes, homes, strict=True):
                peaks[kind, home] = peaks.get((kind, home), 0) + mk.bytes[kind, items, n, s]
                kept = mk.resident_bytes * (mk.name in resident)
                idles[kind, home] = idles.get((kind, home), 0) + kept
            blocks = dict(zip(homes, sizes, strict=True)).values()
            used = tuple(sum(n for k, n in blocks if k == kind) for kind in range(len(devices)))
            away = [mk for mk in makers if mk.name not in resident]
            loading = sum(max((mk.switch[i] for mk in away), default=0.0) for i in (0, 1))
            lead = max(
                mk.share * mk.seconds[kind, items, n, s]
                for mk, (kind, n) in zip(makers, sizes, strict=True)
            )
            yield Way(used, chunk, lead + loading, by_kind(peaks, devices), by_kind(idles, devices))


def by_kind(held, devices):
    """Most memory of a device of each kind."""
    return tuple(
        max((value for (k, _), value in held.items() if k == kind), default=0)
        for kind in range(len(devices))
    )


def divisions(makers):
    """Kind and number of devices of each component, which of them they share, sub-batches."""
    if len(makers) == 1:
        for size in makers[0].sizes():
            yield (size,), (0,), 1
        return
    a, b = makers
    for s in (1, 2):
        for size in set(a.sizes()) & set(b.sizes()):
            yield (size, size), (0, 0), s
        for one, other in itertools.product(a.sizes(), b.sizes()):
            yield (one, other), (0, 1), s
