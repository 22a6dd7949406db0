"""The micro plan: where and how resident each component runs.

A plan is data: it can be printed, saved, compared and edited by hand, and everything in it is
executed as it is written, but for what it expects and why. It is an input (``cluster.plan``) as
well as an output. A hand-written ``cluster.component_placement`` is a plan with the other fields
defaulted. As a file::

    version: 1
    components:
      env: {devices: 0-3, processes: 4, pipeline_stages: 2}
      rollout: {devices: 4-5, pipeline_stages: 2}
      actor: {devices: 0-5, residency: offload}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean, join_choices
from rlinf.config.ranges import device_ranges, device_span, ranges_of
from rlinf.config.validate import validate
from rlinf.config.yaml_source import read_yaml, write_yaml
from rlinf.errors import ConfigError, RunFailure
from rlinf.scheduler.component_grammar import parse_spec
from rlinf.scheduler.errors import PlacementError
from rlinf.scheduler.rank_text import ALL, parse_ranks

Residency = Literal["resident", "offload"]
MOST_PROCESSES = 65_536
PLAN_FILE = "plan.yaml"
"""In a run directory: the plan that the run is under."""


class ComponentPlan(StrictModel):
    """How one component runs."""

    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Hardware ranks that the component occupies, such as ``0-3,6``; without accelerators or CPU
    slots, node ranks. With processes behind colons, ``0:0-2,1:3``, also which process has which."""
    spread: tuple[tuple[int, ...], ...] | None = Field(default=None, exclude=True)
    """Devices of each process, where `devices` says them and they are not shared evenly."""
    processes: int = Field(ge=1, le=MOST_PROCESSES)
    """Workers of the component, which share the devices, or divide them, evenly; by default one
    on each device."""
    residency: Residency = "resident"
    """Whether it keeps its device memory while other components use the device."""
    pipeline_stages: int = Field(default=1, ge=1)
    """Sub-batches in flight inside a loop."""
    predicted_seconds: float | None = None
    """Time per step that the planner expects; None for a hand-written plan."""
    predicted_bytes: int | None = None
    """Most memory of one device that the planner expects; None for a hand-written plan."""
    reason: str = "hand-written placement"
    """Why it was chosen."""

    @model_validator(mode="before")
    @classmethod
    def _one_process_per_device(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if "spread" in data:
            raise illegal("spread", "is what `devices` says", hint="devices: 0:0-2,1:3")
        if "devices" not in data:
            return {"processes": 1, **data}  # the devices alone are missed
        devices = data["devices"]
        if isinstance(devices, str):
            return cls._read_devices(devices, data)
        if isinstance(devices, int | list):
            try:
                devices = tuple(parse_ranks(devices, "device"))
            except PlacementError as error:
                raise illegal("devices", str(error)) from error
        if not isinstance(devices, tuple):
            return {"processes": 1, **data}  # they are what is wrong
        return {"processes": max(1, len(devices)), **data, "devices": devices}

    @classmethod
    def _read_devices(cls, text: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if text.strip().lower() in ("", ALL):
            hint = "a plan stands for one cluster: write its devices, such as 0-3"
            raise illegal("devices", f"names no devices by {text.strip()!r}", hint=hint)
        try:
            each = parse_spec(text)
        except PlacementError as error:
            raise illegal("devices", str(error)) from error
        found = {"processes": len(each), **data, "devices": tuple(d for own in each for d in own)}
        if ":" not in text:
            return found
        if found["processes"] != len(each):
            why = f"is {found['processes']}, and the devices '{text}' name {len(each)} processes"
            raise illegal("processes", why, hint="leave it out")
        return found if _evenly(each) else {**found, "spread": tuple(each)}

    @field_validator("devices")
    @classmethod
    def _ascending(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(devices)))

    @field_serializer("devices", when_used="json")
    def _as_ranges(self, devices: tuple[int, ...]) -> str:
        return device_ranges(devices) if self.spread is None else self.placement

    @classmethod
    def of_processes(cls, processes: Sequence[tuple[int, ...]], **others: Any) -> ComponentPlan:
        """The plan of a component by the devices of each of its processes, as a placement says."""
        if not _evenly(processes):
            return cls.model_validate({"devices": _spread_text(processes), **others})
        devices = tuple(sorted({device for own in processes for device in own}))
        return cls(devices=devices, processes=len(processes), **others)

    @property
    def devices_per_process(self) -> int:
        """Devices of a process, the most that one has; 1 where several have the same."""
        if self.spread is not None:
            return max(map(len, self.spread))
        return max(1, len(self.devices) // self.processes)

    def of_process(self, rank: int) -> tuple[int, ...]:
        """Devices of one process."""
        if self.spread is not None:
            return self.spread[rank]
        first = rank * len(self.devices) // self.processes
        return self.devices[first : first + self.devices_per_process]

    @property
    def has_devices_apart(self) -> bool:
        """Whether a process has devices that do not follow one another."""
        parts = map(self.of_process, range(self.processes))
        return any(part[-1] - part[0] >= len(part) for part in parts)

    def on_several_nodes(self, each: int) -> tuple[int, ...]:
        """Devices of the first process that has some of several nodes; empty without one.

        Every node has ``each`` devices.
        """
        parts = map(self.of_process, range(self.processes))
        return next((part for part in parts if part[0] // each != part[-1] // each), ())

    def processes_by_device(self) -> Counter[int]:
        """How many processes each device has."""
        ranks = range(self.processes)
        return Counter(device for rank in ranks for device in self.of_process(rank))

    @property
    def placement(self) -> str:
        """Devices and processes in the grammar of placements, such as ``0-3:0-1``."""
        if self.spread is not None:
            return _spread_text(self.spread)
        if self.processes == len(self.devices):
            return device_ranges(self.devices)
        texts, first = [], 0
        for begin, end in ranges_of(self.devices):
            count = self.processes * (end - begin) // len(self.devices)
            texts.append(f"{device_span(begin, end)}:{device_span(first, first + count)}")
            first += count
        return ",".join(texts)

    def written(self) -> dict[str, Any]:
        """What is executed of it, as plain data, without what is as by default."""
        spread = self.spread is not None
        processes = self.processes if spread else len(self.devices)
        default = {"processes": processes, "residency": "resident", "pipeline_stages": 1}
        found = {key: getattr(self, key) for key in default}
        changed = {key: value for key, value in found.items() if value != default[key]}
        return {"devices": self._as_ranges(self.devices), **changed}


def _evenly(processes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a plan says as much by devices and the number of processes."""
    devices = sorted({device for own in processes for device in own})
    if len(devices) % len(processes) and len(processes) % len(devices):
        return False
    plan = ComponentPlan(devices=tuple(devices), processes=len(processes))
    return all(plan.of_process(rank) == own for rank, own in enumerate(processes))


def _spread_text(processes: Sequence[tuple[int, ...]]) -> str:
    """The devices of each process in the grammar of placements, such as ``0:0-2,1:3``."""
    segments, first = [], 0
    for own, alike in groupby(processes):
        last = first + len(list(alike))
        segments.append(f"{device_ranges(own)}:{device_span(first, last)}")
        first = last
    return ",".join(segments)


class Plan(StrictModel):
    """One :class:`ComponentPlan` per component."""

    version: Literal[1] = 1
    """Of the format."""
    components: Mapping[str, ComponentPlan]
    """Plans by component name."""

    def save(self, path: Path | str) -> None:
        """Write the plan as YAML."""
        Path(path).write_text(write_yaml(self.model_dump(mode="json")), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan from YAML or JSON.

        Raises:
            ConfigError: The file cannot be read, or is not a plan; every fault of one is named.
        """
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is no text"
            raise ConfigError(f"plan '{path}' cannot be read: {why}") from error
        data = read_yaml(text, str(path))[0]
        if "components" not in data:
            beside = Path(path).with_name(PLAN_FILE)
            there = beside.is_file() and beside != path
            nearest = f"; nearest: {beside}" if there else ""
            raise ConfigError(f"'{path}' is no plan: it has no key `components`{nearest}")
        return validate(cls, data, f"plan '{path}'")

    def overlap(self, left: tuple[str, ...], right: tuple[str, ...]) -> bool:
        """Whether two sets of components share a device."""
        return bool(set(self.devices(left)) & set(self.devices(right)))

    def devices(self, components: tuple[str, ...]) -> tuple[int, ...]:
        """Devices that a set of components occupies, ascending."""
        return tuple(sorted({d for name in components for d in self.components[name].devices}))

    def same_places(self, other: Plan) -> bool:
        """Whether both run everything in the same way, whatever they expect, and their reasons."""
        return self.written() == other.written()

    def switches_more_than(self, other: Plan) -> bool:
        """Whether it differs from another in nothing but in more components that offload."""
        offloading, loaded = [], []
        for plan in (self, other):
            parts = [(name, part.written()) for name, part in plan.components.items()]
            offloading.append({name for name, part in parts if part.pop("residency", None)})
            loaded.append(dict(parts))
        return loaded[0] == loaded[1] and offloading[0] > offloading[1]

    def written(self) -> dict[str, Any]:
        """What is executed of each component, as plain data that can be a ``cluster.plan``."""
        return {"components": {name: part.written() for name, part in self.components.items()}}

    def with_residency(self, asked: Mapping[str, Residency], *, sharing: Collection[str]) -> Plan:
        """The same plan with the residency of each component decided: as ``asked`` by hand.

        Of the others those of ``sharing`` offload, where they share a device with one another.
        """
        components = dict(self.components)
        for name, plan in self.components.items():
            others = [o for o in sharing if o != name and self.overlap((name,), (o,))]
            if name in asked:
                found, why = asked[name], "residency by hand"
            elif name in sharing and others:
                found, why = "offload", f"shares a device with {', '.join(others)}"
            else:
                continue
            components[name] = plan.model_copy(
                update={"residency": found, "reason": f"{plan.reason}, {why}"}
            )
        return self.model_copy(update={"components": components})

    @property
    def mode(self) -> Literal["collocated", "disaggregated", "hybrid"]:
        """What the placement amounts to: all on the same devices, none shared, or in between."""
        sets = [set(component.devices) for component in self.components.values()]
        if all(devices == sets[0] for devices in sets):
            return "collocated"
        if sum(len(devices) for devices in sets) == len(set().union(*sets)):
            return "disaggregated"
        return "hybrid"

    def table(self) -> list[tuple[str, ...]]:
        """Column names, then one row per component."""
        rows: list[tuple[str, ...]] = [
            ("component", "devices", "processes", "residency", "stages", "reason")
        ]
        for name, plan in self.components.items():
            counts = (str(plan.processes), plan.residency, str(plan.pipeline_stages))
            rows.append((name, plan.written()["devices"], *counts, plan.reason))
        return rows

    def problems(
        self, components: tuple[str, ...], offloading: Collection[str], nodes: int, each: int
    ) -> Iterator[tuple[str, str, str]]:
        """What cannot be executed: key below the plan, why, and the nearest legal value.

        ``components`` are those of the task, and the cluster has ``each`` devices on every node.
        """
        for name in components:
            if name not in self.components:
                known = ", ".join(components)
                yield "components", f"does not place {name}", f"the components are {known}"
        for name, part in self.components.items():
            key = f"components.{name}"
            last, most = part.devices[-1], nodes * each - 1
            many, few = len(part.devices), part.processes
            if name not in components:
                yield key, f"there is no component {name}", did_you_mean(name, components)
            elif last > most:
                near = device_ranges(d for d in part.devices if d <= most) or device_span(0, 1)
                why = f"names device {last}; the cluster has {device_span(0, most + 1)}"
                yield f"{key}.devices", why, f"nearest: {near}"
            elif part.spread is None and many % few and few % many:
                legal = [n for n in range(1, 2 * max(many, few)) if not (n % many and many % n)]
                near = join_choices(sorted(sorted(legal, key=lambda n: abs(n - few))[:2]))
                why = f"{few} do not share {many} devices evenly"
                yield f"{key}.processes", why, f"nearest: {near}"
            elif part.has_devices_apart or part.on_several_nodes(each):
                size = part.devices_per_process
                near = device_span(0, len(part.devices)) if each % size == 0 else "1 per device"
                why = f"gives a process of {size} devices some that are apart, or of two nodes"
                yield f"{key}.devices", why, f"nearest: {near}"
            elif part.residency == "offload" and name not in offloading:
                can = join_choices(tuple(offloading)) or "none"
                why = f"{name} has nothing to offload"
                yield f"{key}.residency", why, f"nearest: resident; components that have: {can}"


# -- cluster.plan -------------------------------------------------------------------------------


class AutoPlanConfig(StrictModel):
    """Measure in the first steps, solve, switch between two steps, keep what measured faster."""

    steps: int = Field(default=4, ge=1)
    """Steps that each placement is measured over, after two that warm up."""
    least_gain: float = Field(default=0.02, ge=0, lt=1)
    """Share of the step time that another plan must save, predicted to be tried and measured to be
    kept."""
    drift: float = Field(default=0.15, gt=0)
    """Plan anew where the step time stays this share away from what it was when the plan was
    kept."""
    window: int = Field(default=20, ge=2)
    """Steps over which the step time must stay away."""


class AutoPlan(StrictModel):
    """A plan that the run finds by itself."""

    auto: AutoPlanConfig = AutoPlanConfig()
    """When it measures and plans."""


def _form_of(value: Any) -> str:
    auto = isinstance(value, AutoPlan) or (isinstance(value, Mapping) and "auto" in value)
    return "auto" if auto else "plan"


PlanChoice = Annotated[
    Annotated[Plan, Tag("plan")] | Annotated[AutoPlan, Tag("auto")], Discriminator(_form_of)
]
"""A plan as it is executed, or when one is looked for."""


def read_plan_choice(value: Any) -> Any:
    """What ``cluster.plan`` says: ``auto`` as its section, a file as the plan in it.

    Raises:
        ConfigError: There is no such file, or no plan in it.
    """
    if not isinstance(value, str | Path):
        return value
    return AutoPlan() if value == "auto" else Plan.load(value)


class SwitchFailure(RunFailure):
    """The run goes on under the placement that it had; ``seconds`` were lost with trying."""

    def __init__(self, cause: Exception, seconds: float) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.seconds = seconds
