"""Published settings: what is known of them, their plans and simulated steps at several sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.planning_traits import ComponentConstraint, Constraints
from rlinf.planner.cluster_shape import GIGABYTE, ClusterShape, parse_cluster_shape
from rlinf.planner.profile import ComponentProfile, Measurement, Profile, ScalingLaw
from rlinf.planner.search import Planned, plan
from rlinf.planner.simulation import Conditions, GenerationModel, Simulation, simulate

# -- where figures are from ----------------------------------------------------------------------


class Origin(StrictModel):
    """Where some figures are from."""

    of: tuple[str, ...] = Field(min_length=1)
    """Their keys; those of a section with dots, such as ``generation.max_running``."""
    kind: Literal["published", "derived", "assumed"]
    """``published`` by others, ``derived`` from what they published, or ``assumed`` by us."""
    why: str = ""
    """Where it is published, how it follows, or why it may be assumed; only what is assumed can
    do without."""

    @model_validator(mode="after")
    def _reason(self) -> Origin:
        if self.kind != "assumed" and not self.why:
            raise illegal("why", f"what is {self.kind} needs a sentence that says where or how")
        return self

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


def check_origins(
    section: StrictModel, origins: Sequence[Origin], *, without: Sequence[str] = ()
) -> None:
    """Refuse a section in which a figure has no origin, or several, or an origin no figure.

    Args:
        section: The section; what it leaves to a default is no figure.
        origins: Origins of its figures.
        without: Keys that are no figures.

    Raises:
        pydantic_core.PydanticCustomError: It does not add up; the key is named.
    """
    stated = list(_stated(section, without))
    named = Counter(key for origin in origins for key in origin.of)
    for key in stated:
        if named[key] != 1:
            why = "has no origin" if not named[key] else f"has {named[key]} origins"
            raise illegal("origins", f"`{key}` {why}", hint="give each figure one")
    for key in named:
        if key not in stated:
            raise illegal("origins", f"`{key}` is no figure that the section gives")


def _stated(section: StrictModel, without: Sequence[str]) -> Iterator[str]:
    for key in sorted(section.model_fields_set - set(without)):
        value = getattr(section, key)
        if isinstance(value, StrictModel):
            yield from (f"{key}.{inner}" for inner in _stated(value, ()))
        else:
            yield key


def origin_of(origins: Sequence[Origin], *keys: str) -> str:
    """The origins of some figures in one text, each once."""
    found = [str(origin) for origin in origins if set(origin.of) & set(keys)]
    return "; ".join(dict.fromkeys(found))


# -- what a scenario says --------------------------------------------------------------------------

# Parts and multiples of the published number of items for which times are derived.
SCALES = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 16.0, 64.0)
MOST_DEVICES = 8192


class ScenarioComponent(StrictModel):
    """What a scenario says about one component."""

    origins: tuple[Origin, ...]
    """Where its figures are from, each of them."""
    generation: GenerationModel | None = None
    """Its times follow from the lengths of sequences."""
    seconds: float = 0.0
    """Time of a step [s]."""
    items: int = 1
    """Items of that step."""
    devices: int = 8
    """Devices of that step."""
    fixed_share: float = Field(default=0.0, ge=0, le=1)
    """Part of the time that does not depend on the number of items."""
    factor_per_doubling: float = Field(default=1.0, ge=1)
    """Loss for every doubling of the devices."""
    devices_per_process: int = 1
    """Tensor-parallel size."""
    streams: bool = True
    """Whether it takes items as they come."""
    even: bool = True
    """Whether its processes must share the items evenly."""
    onload_seconds: float = 0.0
    """Time to load [s]."""
    offload_seconds: float = 0.0
    """Time to offload [s]."""
    resident_gb: float = 0.0
    """Memory of a device while idle [GB]."""
    peak_gb: float = 0.0
    """Memory of a device while it runs [GB]."""

    @model_validator(mode="after")
    def _every_figure_has_an_origin(self) -> ScenarioComponent:
        check_origins(self, self.origins, without=("origins",))
        return self


class ScenarioCluster(StrictModel):
    """One size of a scenario."""

    cluster: str
    """Shape of the cluster, such as ``16x8:H100``."""
    items: int
    """Items of a step."""


class Scenario(StrictModel):
    """A published setting, as far as it is published; the rest is assumed and says so."""

    about: str
    """What it is and where it is from."""
    flow: tuple[str | tuple[str, ...], ...]
    """Components in the order of the flow; those of a loop together."""
    clusters: tuple[ScenarioCluster, ...]
    """Sizes to be simulated."""
    group_size: int = 1
    """Items that are never apart."""
    exchanges: int = 1
    """Exchanges of its loop in a step."""
    pipeline_stages: tuple[int, ...] = (1,)
    """Sub-batches in flight that its loop can have."""
    synchronisation_seconds: float = 0.0
    """Time to synchronise weights [s]."""
    origins: tuple[Origin, ...]
    """Where the figures of the scenario itself are from, each of them."""
    components: Mapping[str, ScenarioComponent]
    """Figures by component."""

    @model_validator(mode="after")
    def _every_figure_has_an_origin(self) -> Scenario:
        check_origins(self, self.origins, without=("about", "flow", "origins", "components"))
        return self

    def graph(self) -> Flow:
        """The flow: a chain of nodes."""
        flow = Flow("scenario")
        for position, part in enumerate(self.flow):
            inputs = (f"stream{position}",) if position else ()
            outputs = (f"stream{position + 1}",) if position + 1 < len(self.flow) else ()
            if isinstance(part, str):
                flow.stage(part, Stage(part, "run", inputs, outputs))
                continue
            first, second = part
            forth, back = f"{first} to {second}", f"{second} to {first}"
            flow.loop(
                f"{first}-{second}",
                Stage(first, "run", (*inputs, back), (forth, *outputs)),
                Stage(second, "run", (forth,), (back,)),
            )
        return flow

    def constraints(self, items: int, staleness: int = 0) -> Constraints:
        """The work of a step and the limits of the components."""
        return Constraints(
            items=items,
            group_size=self.group_size,
            staleness=staleness,
            exchanges={node.name: self.exchanges for node in self.graph().nodes if node.is_loop},
            components={
                name: ComponentConstraint(
                    devices_per_process=part.devices_per_process,
                    streams=part.streams,
                    even=part.even,
                    pipeline_stages=self.pipeline_stages,
                )
                for name, part in self.components.items()
            },
        )

    def profile(self) -> Profile:
        """Times that follow from the figures, each with its origin."""
        return Profile(
            hardware="simulated",
            model="simulated",
            config=self.about,
            synchronisation_seconds=self.synchronisation_seconds,
            components={
                name: _component_profile(part, self.group_size)
                for name, part in self.components.items()
            },
        )

    def generation(self) -> dict[str, GenerationModel]:
        """Models of the components whose time depends on lengths."""
        models = {name: part.generation for name, part in self.components.items()}
        return {name: model for name, model in models.items() if model is not None}


def _component_profile(part: ScenarioComponent, group_size: int) -> ComponentProfile:
    return ComponentProfile(
        measurements=_generated(part, group_size) if part.generation else _scaled(part),
        onload_seconds=part.onload_seconds,
        offload_seconds=part.offload_seconds,
        resident_bytes=int(part.resident_gb * GIGABYTE),
        concurrent=part.generation is not None,
        first_result_share=_first_result_share(part, group_size) if part.generation else 0.0,
        scaling=ScalingLaw(
            lowest=1,
            highest=MOST_DEVICES,
            factor_per_doubling=part.factor_per_doubling,
            origin=_said(part, "factor_per_doubling"),
        ),
    )


def _scaled(part: ScenarioComponent) -> tuple[Measurement, ...]:
    """The given time, for other numbers of items: a fixed part and one in proportion."""
    counts = {max(1, round(scale * part.items)) for scale in SCALES}
    return tuple(
        Measurement(
            items=items,
            devices=part.devices,
            seconds=part.seconds * (part.fixed_share + (1 - part.fixed_share) * items / part.items),
            peak_bytes=int(part.peak_gb * GIGABYTE),
            origin=_said(part, "seconds")
            if items == part.items
            else f"derived from {_said(part, 'seconds', 'fixed_share')}",
        )
        for items in sorted(counts)
    )


def _generated(part: ScenarioComponent, group_size: int) -> tuple[Measurement, ...]:
    """Times of the generation model for some numbers of groups per engine, the median of draws."""
    model = part.generation
    assert model is not None
    said = _said(part, "generation.seconds_fixed", "generation.lengths.mean")
    found = []
    for groups in (1, 2, 4, 8, 16, 32, 64):
        rng = np.random.default_rng(groups)
        engines = part.devices // part.devices_per_process
        draws = [model.groups(rng, groups * engines, group_size, engines) for _ in range(5)]
        found.append(
            Measurement(
                items=groups * engines * group_size,
                devices=part.devices,
                seconds=float(np.median([done.max() for _, done, _ in draws])),
                peak_bytes=int(part.peak_gb * GIGABYTE),
                samples=5,
                origin=f"derived by the model of generation from {said}",
            )
        )
    return tuple(found)


def _said(part: ScenarioComponent, *keys: str) -> str:
    """Where figures of a component are from; what it leaves to a default is assumed."""
    return origin_of(part.origins, *keys) or "assumed"


def _first_result_share(part: ScenarioComponent, group_size: int) -> float:
    """Share such that, with results coming evenly after it, their mean time is right."""
    model = part.generation
    assert model is not None
    ready, done, _ = model.groups(np.random.default_rng(0), 256, group_size, 64)
    return float(np.clip(2 * ready.mean() / done.max() - 1, 0.0, 0.99))


@cache
def scenarios() -> dict[str, Scenario]:
    """All scenarios that are shipped, by name."""
    text = Path(__file__).with_name("scenarios.yaml").read_text(encoding="utf-8")
    return {name: Scenario.model_validate(part) for name, part in yaml.safe_load(text).items()}


def find_scenario(name: str) -> Scenario:
    """A shipped scenario.

    Raises:
        ConfigError: There is none of that name; the nearest is given.
    """
    known = scenarios()
    if name not in known:
        raise ConfigError(f"'{name}' is no scenario; {did_you_mean(name, known)}")
    return known[name]


# -- plans and simulations -------------------------------------------------------------------------

# Enough to find the best plan of every mode among the next best ones.
CONSIDERED = 40


@dataclass(frozen=True)
class ScenarioResult:
    """One placement of one scenario on one cluster; all figures are simulated.

    Args:
        cluster: The cluster.
        items: Items of a step.
        mode: What the placement amounts to.
        planned: The plan, with what the planner expects.
        simulation: What the simulator found.
        best: Whether the planner chose it.
    """

    cluster: ClusterShape
    items: int
    mode: str
    planned: Planned
    simulation: Simulation
    best: bool


def run_scenario(
    name: str, *, clusters: tuple[str, ...] = (), steps: int = 10, staleness: int = 0, seed: int = 0
) -> Iterator[ScenarioResult]:
    """Plan and simulate the best collocated, disaggregated and hybrid placement at every size.

    A mode that takes more than twice as long as taking turns is left out.

    Args:
        name: Name of the scenario.
        clusters: Shapes such as ``16x8:H100``; by default those of the scenario. A shape that the
            scenario does not list has the items of its largest.
        steps: Steps to simulate.
        staleness: Steps by which weights may be old.
        seed: Seed of the lengths.

    Raises:
        ConfigError: The scenario is not known, a shape cannot be read, or nothing fits.
    """
    scenario = find_scenario(name)
    for text, items in _sizes(scenario, clusters):
        cluster = parse_cluster_shape(text)
        constraints = scenario.constraints(items, staleness)
        conditions = Conditions(steps=steps, seed=seed, generation=scenario.generation())
        yield from _outcomes(scenario, cluster, constraints, conditions)


def _sizes(scenario: Scenario, clusters: tuple[str, ...]) -> list[tuple[str, int]]:
    """Clusters and items that are to be simulated."""
    known = [(size.cluster, size.items) for size in scenario.clusters]
    largest = max(items for _, items in known)
    found = []
    for text in clusters:
        found += [size for size in known if size[0] == text] or [(text, largest)]
    return found or known


def _outcomes(
    scenario: Scenario, cluster: ClusterShape, constraints: Constraints, conditions: Conditions
) -> Iterator[ScenarioResult]:
    flow, profile = scenario.graph(), scenario.profile()
    best = plan(flow, profile, cluster, constraints, alternatives=CONSIDERED)
    seen: set[str] = set()
    for planned in (best, *best.alternatives):
        mode = planned.plan.mode
        if mode in seen:
            continue
        seen.add(mode)
        simulation = simulate(
            flow, planned.plan, profile, cluster, constraints,
            conditions=replace(conditions, hand_overs=planned.hand_overs),
        )  # fmt: skip
        yield ScenarioResult(cluster, constraints.items, mode, planned, simulation, planned is best)


HEADER = (
    "cluster", "items", "mode", "composition", "devices", "planned", "simulated", "10–90 %", "idle",
)  # fmt: skip


def table(outcomes: Iterator[ScenarioResult]) -> list[tuple[str, ...]]:
    """Column names, then a row per placement; the planner's choice has a star."""
    rows: list[tuple[str, ...]] = [HEADER]
    for outcome in outcomes:
        low, middle, high = outcome.simulation.quantiles(0.1, 0.5, 0.9)
        devices = {n: len(p.devices) for n, p in outcome.planned.plan.components.items()}
        rows.append(
            (
                str(outcome.cluster),
                str(outcome.items),
                outcome.mode + (" *" if outcome.best else ""),
                outcome.planned.shape,
                " ".join(f"{name} {count}" for name, count in devices.items()),
                f"{outcome.planned.seconds:.1f} s",
                f"{middle:.1f} s",
                f"{low:.1f}–{high:.1f} s",
                f"{100 * outcome.simulation.idle_fraction:.0f} %",
            )
        )
    return rows
