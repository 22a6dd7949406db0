"""What a plan is asked for: the work of one step, and what each component can and cannot do."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean, join_choices, nearest_multiples
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.plan import Residency


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
        known = [stage.component for _, stage in flow.stages()]
        for name in self.components:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"'{name}' is no component of flow '{flow.name}'; {hint}")
            served = self.components[name].serves
            beside = next(n.components for n in flow.nodes if name in n.components)
            if served and served not in beside:
                hint = did_you_mean(served, beside)
                raise ConfigError(f"'{name}' serves '{served}', which is not in its loop; {hint}")
        loops = [node.name for node in flow.nodes if node.is_loop]
        for name in self.exchanges:
            if name not in loops:
                hint = did_you_mean(name, loops) or "it has no loop"
                raise ConfigError(f"'{name}' is no loop of flow '{flow.name}'; {hint}")
