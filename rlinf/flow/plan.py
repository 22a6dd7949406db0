"""The micro plan: where and how resident each component runs.

A plan is data: it can be printed, saved, compared and edited by hand. A hand-written
``cluster.component_placement`` is a plan with the other fields defaulted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import Field

from rlinf.config.base import StrictModel

Residency = Literal["resident", "offload"]


class ComponentPlan(StrictModel):
    """How one component runs."""

    devices: tuple[int, ...]
    """Hardware ranks that the component occupies; without accelerators or slots, node ranks."""
    processes: int = Field(ge=1)
    """Workers of the component."""
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


class Plan(StrictModel):
    """One :class:`ComponentPlan` per component."""

    components: Mapping[str, ComponentPlan]
    """Plans by component name."""

    def overlap(self, left: tuple[str, ...], right: tuple[str, ...]) -> bool:
        """Whether two sets of components share a device."""
        return bool(set(self.devices(left)) & set(self.devices(right)))

    def devices(self, components: tuple[str, ...]) -> tuple[int, ...]:
        """Devices that a set of components occupies, ascending."""
        return tuple(sorted({d for name in components for d in self.components[name].devices}))

    def same_places(self, other: Plan) -> bool:
        """Whether both run everything in the same way, whatever they expect, and their reasons."""
        return self._places() == other._places()

    def switches_more_than(self, other: Plan) -> bool:
        """Whether it differs from another in nothing but in more components that offload."""
        loaded = [plan._loaded()._places() for plan in (self, other)]
        return loaded[0] == loaded[1] and self._offloading() > other._offloading()

    def _offloading(self) -> set[str]:
        return {name for name, part in self.components.items() if part.residency == "offload"}

    def _loaded(self) -> Plan:
        resident = {
            name: part.model_copy(update={"residency": "resident"})
            for name, part in self.components.items()
        }
        return self.model_copy(update={"components": resident})

    def _places(self) -> dict[str, tuple[object, ...]]:
        return {
            name: (part.devices, part.processes, part.residency, part.pipeline_stages)
            for name, part in self.components.items()
        }

    def with_residency(self, asked: Mapping[str, Residency], *, sharing: Collection[str]) -> Plan:
        """The same plan with the residency of each component decided.

        Args:
            asked: Residency by component, where it was written by hand.
            sharing: Those that else offload where they share a device with another of them.
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
        header = ("component", "devices", "processes", "residency", "stages", "reason")
        return [
            header,
            *(
                (
                    name,
                    ",".join(map(str, plan.devices)),
                    str(plan.processes),
                    plan.residency,
                    str(plan.pipeline_stages),
                    plan.reason,
                )
                for name, plan in self.components.items()
            ),
        ]
