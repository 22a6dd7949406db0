"""What was measured: time and memory of every component of a flow, and where the figures are from.

A profile is data. It never guesses: what lies between measurements is the business of
:mod:`rlinf.planner.costs`, and what lies beyond them needs a :class:`ScalingLaw` that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from rlinf.config.base import StrictModel
from rlinf.config.nearest import join_choices
from rlinf.config.reasons import show
from rlinf.errors import ConfigError


class Measurement(StrictModel):
    """Time and memory of one component in one training step, at one size."""

    items: int = Field(ge=1)
    """Items of the step that all its workers together processed: sequences, environments."""
    devices: int = Field(ge=1)
    """Devices that its workers occupied together."""
    processes: int | None = Field(default=None, ge=1)
    """Workers that shared these devices; None: as many as a plan gives them, one on each or on each
    few that belong together."""
    pipeline_stages: int = Field(default=1, ge=1)
    """Sub-batches in flight inside a loop while it was measured."""
    seconds: float = Field(gt=0)
    """Median time of the slowest worker, without waiting for input, loading and offloading [s]."""
    closing_seconds: float = Field(default=0.0, ge=0)
    """Part of that time which the last pass of a loop takes; the rest is shared evenly by the
    exchanges before it [s]."""
    spread: float = Field(default=0.0, ge=0)
    """Interquartile range of that time [s]."""
    peak_bytes: int = Field(default=0, ge=0)
    """Most memory of one device that the component held while it ran."""
    samples: int = Field(default=1, ge=1)
    """Steps that the median is taken over."""
    device_kind: str = ""
    """Kind of the devices, such as ``H100`` or ``cpu``; empty: not said."""
    origin: str
    """Where the figure is from: the run and its date, or the publication and its setting."""

    @property
    def size(self) -> tuple[str, int, int, int, int]:
        """What tells it from other measurements of the component; 0: processes are not said, as how
        many devices belong together is not known here."""
        processes = self.processes or 0
        return self.device_kind, self.pipeline_stages, self.devices, self.items, processes


class ScalingLaw(StrictModel):
    """What is assumed for numbers of devices that were not measured.

    Devices share the items evenly: ``d`` devices take as long for ``n`` items as the ``D`` measured
    ones (the nearest number) for ``n·D/d``, times ``factor_per_doubling ** |log2(d/D)|``.
    """

    lowest: int = Field(ge=1)
    """Fewest devices that the law is applied to."""
    highest: int = Field(ge=1)
    """Most devices that the law is applied to."""
    factor_per_doubling: float = Field(default=1.0, ge=1)
    """Loss for every doubling or halving of the devices; 1 is perfect scaling."""
    origin: str
    """Why it may be assumed."""


class ComponentProfile(StrictModel):
    """Everything measured about one component."""

    measurements: tuple[Measurement, ...] = Field(min_length=1)
    """They may differ in items, devices, pipeline stages and kind of device."""
    onload_seconds: float | None = Field(default=None, ge=0)
    """Time to bring its state to the device [s]; None: not measured."""
    offload_seconds: float | None = Field(default=None, ge=0)
    """Time to take its state off the device [s]; None: not measured."""
    resident_bytes: int = Field(default=0, ge=0)
    """Memory of one device that it holds while it is idle and not offloaded."""
    transfer_seconds_per_item: float = Field(default=0.0, ge=0)
    """Time to hand one of its results to the next component [s]."""
    concurrent: bool = False
    """Whether all items are in service at once, as sequences in an engine: the results of ``n``
    items then arrive one after the other, not chunk by chunk."""
    first_result_share: float = Field(default=0.0, ge=0, lt=1)
    """For a concurrent component, the part of its time that passes before results begin to come
    evenly; long sequences make it large."""
    scaling: ScalingLaw | None = None
    """Law for numbers of devices outside of the measured range; None: they are not legal."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of devices that it was measured on, sorted."""
        return tuple(sorted({measurement.device_kind for measurement in self.measurements}))

    @property
    def switch_is_measured(self) -> bool:
        """Whether it is known what loading and offloading take; else they are taken as 0 s."""
        return self.onload_seconds is not None and self.offload_seconds is not None


def named_kinds(kinds: Iterable[str]) -> str:
    """Kinds of devices as a person reads them: ``H100, cpu``, or that they are not named."""
    return join_choices([kind or "devices without a named kind" for kind in kinds])


class Exchange(StrictModel):
    """Time in which a loop waits for its own hand-overs: to wake a worker is not free."""

    node: str
    """The loop."""
    apart: bool
    """Whether its stages ran on different devices."""
    devices: int = Field(ge=1)
    """Devices of all stages."""
    seconds: float = Field(ge=0)
    """Median time per exchange in which none of its stages worked [s]."""


class PlacedStep(StrictModel):
    """Time of whole steps of a recipe, as it was placed."""

    items: int = Field(ge=1)
    """Items of a step."""
    staleness: int = Field(default=0, ge=0)
    """Steps by which its weights might be old."""
    plan: Mapping[str, Any]
    """What was executed, as a plan writes it."""
    seconds: float = Field(gt=0)
    """Median of the steps [s]."""
    origin: str
    """Where the figure is from."""

    def same_setting(self, other: PlacedStep) -> bool:
        """Whether both are of the same work in the same places."""
        figures = {"seconds", "origin"}
        return self.model_dump(exclude=figures) == other.model_dump(exclude=figures)


class Fingerprints(StrictModel):
    """What a profile is valid for, as text that is compared whole and can be read."""

    hardware: str
    """The machine, such as ``8x H100`` or ``2 CPU slots``."""
    model: str
    config: str
    """The parts of the recipe that change the costs."""
    settings: Mapping[str, Any] = {}
    """The keys of both; empty in a profile of before they were written down."""

    def profile(
        self, components: Mapping[str, ComponentProfile], overhead: Overhead | None = None
    ) -> Profile:
        """A profile of these components, and of what steps take beside their work."""
        return Profile(**dict(self), **dict(overhead or Overhead()), components=components)

    def differences(self, profile: Fingerprints) -> tuple[str, ...]:
        """Say what a profile was measured on that is different here; empty where nothing is."""
        found: list[tuple[str, Any, Any]] = []
        for name in ("model", "config"):
            own, theirs = getattr(self, name), getattr(profile, name)
            if own != theirs:
                found += self._other_keys(profile, name) or [(name, own, theirs)]
        others = tuple(
            f"{name} is {show(own)}, the profile was measured with {show(theirs)}"
            for name, own, theirs in found
        )
        same_machine = self.hardware == profile.hardware
        return others if same_machine else (self._other_machine(profile.hardware), *others)

    def _other_machine(self, theirs: str) -> str:
        """Say which parts of the machine are different, whole: names may differ at their end."""
        here, there = self.hardware.split(", "), theirs.split(", ")
        own = ", ".join(part for part in here if part not in there)
        other = ", ".join(part for part in there if part not in here)
        if not own:
            return f"hardware is without '{other}', the profile was measured with it"
        measured = f"with '{other}'" if other else "without"
        return f"hardware is '{own}', the profile was measured {measured}"

    def _other_keys(self, profile: Fingerprints, part: str) -> list[tuple[str, Any, Any]]:
        """Keys of the model, or of the config without it, with both values."""
        own, theirs = self.settings, profile.settings
        return [
            (key, own.get(key), theirs.get(key))
            for key in {**own, **theirs}
            if own and theirs and own.get(key) != theirs.get(key)
            if part == ("model" if key.startswith("model.") else "config")
        ]


class Overhead(StrictModel):
    """Times that belong to no component [s]."""

    synchronisation_seconds: float = Field(default=0.0, ge=0)
    """To bring the weights of the trainer to all others, between steps."""
    driver_seconds: float = Field(default=0.0, ge=0)
    """Of a step in which no component works, without the synchronisation."""
    exchanges: tuple[Exchange, ...] = ()
    """What handing over inside of loops takes."""


class Profile(Overhead, Fingerprints):
    """Measurements of all components, with fingerprints of what they are valid for."""

    overlap_factor: float = Field(default=1.0, ge=1)
    """How much longer than the slower one alone two parts of a flow take that work on different
    steps at the same time: they share caches, memory and, as threads, an interpreter."""
    steps: tuple[PlacedStep, ...] = ()
    """Whole steps that were measured, to compare a prediction with."""
    components: Mapping[str, ComponentProfile]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of devices that its components were measured on, sorted."""
        return tuple(sorted({kind for part in self.components.values() for kind in part.kinds}))

    @property
    def fixed_seconds(self) -> float:
        """Time of a step that does not depend on its plan [s]."""
        return self.synchronisation_seconds + self.driver_seconds

    def exchange_seconds(self, node: str, devices: int, *, apart: bool) -> float:
        """Time of an exchange of a loop as measured on the nearest number of devices [s]."""
        known = [e for e in self.exchanges if e.node == node]
        known = [e for e in known if e.apart == apart] or known
        nearest = min(known, key=lambda e: abs(e.devices - devices), default=None)
        return 0.0 if nearest is None else nearest.seconds

    def switch_seconds(self, names: Iterable[str]) -> tuple[float, float]:
        """Time to load some components, and to offload them [s].

        Workers load at the same time, and offload at the same time, so the slowest counts.
        """
        parts = [self.components[name] for name in names]
        onload = max((part.onload_seconds or 0.0 for part in parts), default=0.0)
        return onload, max((part.offload_seconds or 0.0 for part in parts), default=0.0)

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a profile.

        Raises:
            ConfigError: The file cannot be read, or is not a profile; the first fault is named.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"profile '{path}' cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise ConfigError(f"profile '{path}': {where}: {first['msg']}") from error
