"""What one node does in one simulated step."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.flow.graph import Node
from rlinf.flow.plan import Plan
from rlinf.planner.search.formulas import Floats
from rlinf.planner.search.problem import Problem
from rlinf.planner.simulation.answer_lengths import GenerationModel


def chunk_by_chunk(arrivals: Floats, begin: float, units: int, seconds: float) -> Floats:
    """[U] when each unit leaves a stage that takes ``units`` of them at once, for ``seconds``.

    ``end_k = max(end_{k−1}, arrival of the last unit of chunk k) + seconds``, in closed form:
    ``end_k = max over j ≤ k of (arrival_j + (k − j + 1) · seconds)``. ``arrivals`` are [U] and
    ascending, and the stage can begin at ``begin`` [s]; ``units`` divides U.
    """
    last = np.maximum(arrivals[units - 1 :: units], begin)
    done = np.arange(len(last)) * seconds
    return np.repeat(np.maximum.accumulate(last - done) + done + seconds, units)


def play_loop(
    seconds: Sequence[float],
    homes: Sequence[object],
    *,
    exchanges: int,
    stages: int,
    closing: Sequence[float] = (),
    between: float = 0.0,
) -> float:
    """Time of a loop, sub-batch by sub-batch: each device serves who has waited longest [s].

    Args:
        seconds: Time of each stage for all exchanges of all sub-batches [s].
        homes: The devices of each stage; stages with equal homes take turns.
        exchanges: How often a sub-batch passes through all stages.
        stages: Sub-batches in flight.
        closing: Part of each stage's time that is spent in a last pass, after the exchanges [s].
        between: Time of an exchange in which no stage works [s].
    """
    # The first stage sends without work what the others begin with: it is the last of a pass.
    seconds, homes = [*seconds[1:], seconds[0]], [*homes[1:], homes[0]]
    once = [*closing[1:], *closing[:1]] or [0.0] * len(seconds)
    passes = [[(s - c) / (exchanges * stages) for s, c in zip(seconds, once, strict=True)]]
    passes = passes * exchanges + [[c / stages for c in once]]
    free: dict[object, float] = dict.fromkeys(homes, 0.0)
    # Time of arrival, then the order of arrival, which also makes equal times deterministic.
    waiting = [(0.0, sub, 0, 0) for sub in range(stages)]
    arrived, end = stages, 0.0
    while waiting:
        ready, _, exchange, stage = heapq.heappop(waiting)
        free[homes[stage]] = left = max(ready, free[homes[stage]]) + passes[exchange][stage]
        end = max(end, left + between * (exchange < exchanges))
        if stage + 1 < len(seconds):
            heapq.heappush(waiting, (left, arrived, exchange, stage + 1))
        elif exchange + 1 < len(passes):
            heapq.heappush(waiting, (left + between, arrived, exchange + 1, 0))
        arrived += 1
    return end


def pass_through(arrivals: Floats, seconds: Sequence[float], homes: Sequence[object]) -> Floats:
    """[U] when each unit leaves a loop whose stages serve units as they come, without a bound.

    ``arrivals`` are [U], when units have left the first stage; ``seconds``, for all units, and
    ``homes`` are those of the further stages.
    """
    waiting = [(float(t), unit, 0) for unit, t in enumerate(arrivals)]
    free = dict.fromkeys(homes, 0.0)
    ends = np.empty(len(arrivals))
    while waiting:
        ready, unit, stage = heapq.heappop(waiting)
        if stage == len(seconds):
            ends[unit] = ready
            continue
        home = homes[stage]
        free[home] = max(ready, free[home]) + seconds[stage] / len(arrivals)
        heapq.heappush(waiting, (free[home], unit, stage + 1))
    return np.sort(ends)


@dataclass(frozen=True)
class NodeWork:
    """What a node did with the units of a step; times from the start of the simulation [s]."""

    ready: Floats  # [U] when each unit can be taken by the next node, ascending
    end: float  # when the node has processed everything
    busy: Mapping[str, float]  # time that each component worked, without waiting
    engines: Mapping[str, Floats]
    """Time at which each engine of a generating component was done, by component."""
    tokens: int = 0  # that were generated


class NodeModel:
    """Times of one node under one plan.

    Args:
        generation: Models of the components whose time depends on lengths.
        hand_over: Items per hand-over; None: what the constraints say.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        node: Node,
        generation: Mapping[str, GenerationModel],
        hand_over: int | None = None,
    ) -> None:
        self._problem = problem
        self._plan = plan
        self._node = node
        self._generation = generation
        items = problem.constraints.items
        self._units = items // problem.constraints.group_size
        self._hand_over = hand_over or problem.constraints.handed_over
        self._chunks = items // self._hand_over
        self._sampled = next((n for n in node.components if n in generation), None)
        self._concurrent = any(problem.profile.components[n].concurrent for n in node.components)
        self._stages = plan.components[node.components[0]].pipeline_stages
        self._homes = {name: plan.components[name].devices for name in node.components}
        # A component that generates takes as long as its sequences, not as was measured.
        times = {n: (0.0, 0.0, 0.0) if n in generation else self._of(n) for n in node.components}
        self._seconds = {name: seconds for name, (seconds, _, _) in times.items()}
        self._leads = {name: lead for name, (_, lead, _) in times.items()}
        self._closing = [closing for _, _, closing in times.values()]

    def _of(self, name: str) -> tuple[float, float, float]:
        """Measured time of a component per chunk, before its first result [s]; its last pass."""
        plan, problem, items = self._plan.components[name], self._problem, self._hand_over
        kind, stages = problem.kind_of(plan.devices[0]), plan.pipeline_stages
        problem.cost(name, kind).check_devices(len(plan.devices), stages)
        size = np.array([len(plan.devices)])
        found = problem.seconds(name, kind, size, items=items, stages=stages)
        lead = problem.lead(name, kind, size, stages=stages)
        closing = problem.closing(name, kind, size, items=items, stages=stages)
        return float(found[0]), float(lead[0]), float(closing[0])

    def run(
        self, rng: np.random.Generator, arrivals: Floats, begin: float, factor: float
    ) -> NodeWork:
        """Process the units of a step, [U] of which arrive at ascending times [s].

        The node can begin at ``begin`` and takes ``factor`` times as long as in the median.
        """
        if self._sampled is not None:
            return self._generate(self._sampled, rng, arrivals, begin, factor)
        busy = {
            name: factor * (self._leads[name] + seconds * self._chunks)
            for name, seconds in self._seconds.items()
        }
        lead = factor * max(self._leads.values())
        ready = self._measured(arrivals + lead, begin + lead, factor)
        return NodeWork(ready, float(ready[-1]), busy, {})

    def _measured(self, arrivals: Floats, begin: float, factor: float) -> Floats:
        """When units leave a node whose times were measured."""
        seconds = [factor * s for s in self._seconds.values()]
        units = self._units // self._chunks
        if not self._node.is_loop:
            if self._concurrent:
                # The results of all items come one after the other.
                return chunk_by_chunk(arrivals, begin, 1, seconds[0] / units)
            return chunk_by_chunk(arrivals, begin, units, seconds[0])
        exchanges = self._problem.constraints.exchanges.get(self._node.name, 1)
        homes = list(self._homes.values())
        if self._concurrent:
            passes = np.zeros(exchanges * self._stages)
            total = float(pass_through(passes, seconds, homes)[-1])
        else:
            total = play_loop(
                seconds,
                homes,
                exchanges=exchanges,
                stages=self._stages,
                closing=[t * share for t, share in zip(seconds, self._closing, strict=True)],
                between=self._problem.profile.exchange_seconds(
                    self._node.name,
                    len(self._plan.devices(self._node.components)),
                    apart=len(set(homes)) > 1,
                ),
            )
        return chunk_by_chunk(arrivals, begin, units, total)

    def _generate(
        self, name: str, rng: np.random.Generator, arrivals: Floats, begin: float, factor: float
    ) -> NodeWork:
        """When units leave a node in which sequences are generated, then passed on in a loop."""
        model, size = self._generation[name], self._problem.constraints.group_size
        engines = self._plan.components[name].processes
        begin = max(begin, float(arrivals[-1]))
        ready, done, tokens = model.groups(rng, self._units, size, engines)
        ready, done = begin + factor * np.sort(ready), begin + factor * done
        others = [n for n in self._node.components if n != name]
        seconds = [factor * self._seconds[n] * self._chunks for n in others]
        left = pass_through(ready, seconds, [self._homes[n] for n in others]) if others else ready
        busy = {name: float(done.mean() - begin), **dict(zip(others, seconds, strict=True))}
        return NodeWork(left, float(max(left[-1], done.max())), busy, {name: done}, tokens)
