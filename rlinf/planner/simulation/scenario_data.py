"""What a scenario file says, and the flow, profile and constraints that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import numpy as np
import yaml
from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.flow.constraints import ComponentConstraint, Constraints
from rlinf.flow.graph import Flow, Stage
from rlinf.planner.cluster_shape import GIGABYTE
from rlinf.planner.profile import ComponentProfile, Measurement, Profile, ScalingLaw
from rlinf.planner.simulation.generation import GenerationModel
from rlinf.planner.simulation.origins import Origin, check_origins, origin_of

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
    text = resources.files(__package__).joinpath("scenarios.yaml").read_text(encoding="utf-8")
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
