"""What planning and profiling must know of a recipe: work and limits, settings to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.dump import to_data
from rlinf.config.nearest import (
    did_you_mean,
    join_choices,
    nearest_multiples,
    nearest_numbers,
)
from rlinf.config.ranges import device_span
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.plan import Residency

if TYPE_CHECKING:
    from rlinf.flow.placed_config import PlacedConfig

WARM_UP_STEPS = 2


class ComponentConstraint(StrictModel):
    """What one component can do."""

    devices_per_process: int = Field(default=1, ge=1)
    """Devices of one process: of an engine its tensor-parallel size times its pipeline-parallel
    size."""
    processes_per_replica: int = Field(default=1, ge=1)
    """Processes that work on the same items together: of a trainer, whose ranks are a process each,
    its tensor-parallel size."""
    even: bool = True
    """Whether the replicas must share the items evenly, in whole groups. False: the fullest replica
    may have more, and sets the time."""
    processes: tuple[int, ...] = ()
    """Numbers of processes that are legal; empty: every one that the other rules allow."""
    also_divide: tuple[int, ...] = ()
    """Numbers, beside the items, that its processes times the sub-batches in flight must divide."""
    serves: str = ""
    """Component of the same loop whose sub-batches it takes, each of its processes at least one; it
    then has at most as many processes as that one has sub-batches in flight, over all of its
    processes. Empty: nothing limits it so."""
    device_kinds: tuple[str, ...] = ()
    """Kinds of devices that it can run on; empty: every kind that it was measured on."""
    pipeline_stages: tuple[int, ...] = Field(default=(1,), min_length=1)
    """Numbers of sub-batches in flight that it can have inside of a loop."""
    streams: bool = True
    """Whether it takes items as they come; False: it begins when it has all items of the step."""
    residency: Residency | None = None
    """What happens to its memory while it is idle; None: the planner decides."""

    @property
    def devices_per_replica(self) -> int:
        """Devices that work on the same items together."""
        return self.devices_per_process * self.processes_per_replica

    def nearest_processes(self, count: int) -> list[int]:
        """Legal numbers of processes next to ``count``: itself, or one below and one above."""
        size = self.processes_per_replica
        if not self.processes:
            return nearest_multiples(size, count)
        return nearest_numbers((n for n in self.processes if n % size == 0), count)


_NO_LIMIT = ComponentConstraint()


class Constraints(StrictModel):
    """The work of one training step, and the limits of who does it."""

    items: int = Field(ge=1)
    """Items of a step: sequences or environments."""
    group_size: int = Field(default=1, ge=1)
    """Items that belong together and are never handed over, or processed, apart."""
    granularities: tuple[int, ...] = ()
    """Items per hand-over, as the stages of the flow yield them; empty: any whole number of groups
    that divides the items, of which the time model takes the best."""
    exchanges: Mapping[str, int] = Field(default_factory=dict)
    """How often the stages of a loop feed each other in a step, by node; without an entry, once."""
    staleness: int = Field(default=0, ge=0)
    """Steps by which weights may be old when a step starts; from 1 on, the first part of a flow may
    work on the next step while the other part, on other devices, is at this one."""
    components: Mapping[str, ComponentConstraint] = Field(default_factory=dict)
    """Limits by component; one that is not listed has none."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Constraints:
        if self.items % self.group_size:
            near = join_choices(nearest_multiples(self.group_size, self.items))
            why = f"{self.items} are not whole groups of {self.group_size}"
            raise illegal("items", why, hint=f"nearest: {near}")
        for granularity in self.granularities:
            if granularity % self.group_size or self.items % granularity:
                nearest = min(self.hand_overs(), key=lambda m: abs(m - granularity))
                why = f"{granularity} is no whole number of groups that divides {self.items} items"
                raise illegal("granularities", why, hint=f"nearest: {nearest}")
        return self

    def hand_overs(self) -> tuple[int, ...]:
        """All numbers of items per hand-over that keep groups whole and divide the items."""
        groups = self.items // self.group_size
        return tuple(self.group_size * n for n in range(1, groups + 1) if groups % n == 0)

    def considered(self) -> tuple[int, ...]:
        """Items per hand-over to search, ascending, always with that of a single one."""
        return tuple(sorted({*(self.granularities or self.hand_overs()), self.items}))

    @property
    def handed_over(self) -> int:
        """Items per hand-over where nothing else is known."""
        return min(self.granularities, default=self.items)

    def of(self, component: str) -> ComponentConstraint:
        """Limits of a component."""
        return self.components.get(component, _NO_LIMIT)

    def check_names(self, flow: Flow) -> None:
        """Refuse limits of what is not in the flow.

        Raises:
            ConfigError: A component or a loop is not known; the nearest name is given.
        """
        beside: dict[str, tuple[str, ...]] = {}
        for node, stage in flow.stages():
            beside.setdefault(stage.component, node.components)
        for name, limits in self.components.items():
            if name not in beside:
                hint = did_you_mean(name, beside)
                raise ConfigError(f"'{name}' is no component of flow '{flow.name}'; {hint}")
            served = limits.serves
            if served and served not in beside[name]:
                hint = did_you_mean(served, beside[name])
                raise ConfigError(f"'{name}' serves '{served}', which is not in its loop; {hint}")
        loops = [node.name for node in flow.nodes if node.is_loop]
        for name in self.exchanges:
            if name not in loops:
                hint = did_you_mean(name, loops) or "it has no loop"
                raise ConfigError(f"'{name}' is no loop of flow '{flow.name}'; {hint}")


@dataclass(frozen=True)
class Trial:
    """A setting in which a recipe is measured: what is special about it, and its overrides."""

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Knob:
    """A key whose smaller values need less memory, and its value."""

    key: str
    now: int

    def smaller(self) -> tuple[int, ...]:
        """Smaller values that may be legal, descending: divisors, and halves of the value."""
        halves = {self.now >> n for n in range(1, self.now.bit_length())}
        divisors = {n for n in range(1, self.now) if self.now % n == 0}
        return tuple(sorted(halves | divisors, reverse=True))


@dataclass(frozen=True)
class Generation:
    """Who generates the answers of a recipe, how long one may be, how many run in an engine."""

    component: str
    most_tokens: int
    max_running: int


@dataclass(frozen=True)
class PlanningTraits:
    """What planning must know of a recipe."""

    items: int  # of a step: environments or sequences
    constraints: Constraints  # what its components can do
    trials: Callable[[int, int], Iterable[Trial]]
    """Gives settings to measure, on the devices from one on, and so many of them; those that its
    rules refuse are left out."""
    concurrent: frozenset[str]  # components that serve all items at once
    packages: tuple[str, ...]  # distributions whose version changes times
    sections: Mapping[str, Any]  # of the recipe that change times, the model left out
    worst_case: tuple[str, ...]
    """Overrides under which a step needs most memory, and the run is one step long."""
    memory_knobs: tuple[Knob, ...]
    """Keys whose smaller values need less memory, those first that change the result of training
    least."""
    generation: Generation | None = None  # what it generates; None: no text


def warm_up_steps(config: PlacedConfig) -> int:
    """First steps under a placement whose time does not count.

    Where rollouts run ahead, the first ones may have run before: under another placement.
    """
    return WARM_UP_STEPS + config.planning.constraints.staleness


def device_counts(devices: int) -> list[int]:
    """Numbers of devices to measure: powers of two, and all."""
    return sorted({devices, *(2**n for n in range(devices.bit_length()) if 2**n <= devices)})


def first_devices(count: int, first: int = 0) -> str:
    """So many devices from the first on, in the grammar of placements."""
    return device_span(first, first + count)


def timed_sections(config: PlacedConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """Sections of a recipe that change times, with what does of its cluster.

    Not among it: seeds, paths, how long a run lasts, what is written. Numbers of items and pipeline
    stages, and placements, are what is measured.
    """
    data = to_data(config)
    cluster = {
        key: data["cluster"][key] for key in ("runtime", "num_nodes", "cpu_devices_per_node")
    }
    return {**{name: data[name] for name in names}, "cluster": cluster}
