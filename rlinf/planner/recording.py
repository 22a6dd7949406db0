"""What the steps of a run took, recorded for a profile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.planning_traits import warm_up_steps
from rlinf.flow.running_step import StepReport
from rlinf.planner.described_cluster import kinds_of_components
from rlinf.planner.kept_profiles import fingerprints, keep_profile
from rlinf.planner.measure import PROFILE_FILE, StepRecorder, merged, renewed
from rlinf.planner.overhead import OverheadRecorder, overhead
from rlinf.planner.profile import Profile

log = logging.getLogger(__name__)

FIRST_STEPS = 8


def new_recorder(config: PlacedConfig, flow: Flow, origin: str) -> StepRecorder:
    """A recorder for the steps of a run."""
    traits, plan = config.planning, config.plan
    loops = [node for node in flow.nodes if node.is_loop]
    homes = {n.name: {plan.components[name].devices for name in n.components} for n in loops}
    return StepRecorder(
        plan=plan,
        owners={stage.label: stage.component for _, stage in flow.stages()},
        items=traits.items,
        origin=origin,
        concurrent=traits.concurrent,
        chunks=traits.items // traits.constraints.handed_over,
        warm_up=warm_up_steps(config),
        overhead=OverheadRecorder(
            flow, plan, traits.constraints.exchanges, traits.constraints.staleness
        ),
        device_kinds=kinds_of_components(config, plan),
        sharing={node.name: node.components for node in loops if len(homes[node.name]) == 1},
    )


def beside(recorder: StepRecorder) -> OverheadRecorder:
    """What a recorder of :func:`new_recorder` saw beside the work of components."""
    assert recorder.overhead is not None
    return recorder.overhead


class FirstSteps:
    """Measures a run in its first steps, where it is, and leaves its profile behind.

    Args:
        config: The run.
        flow: What happens in a step.
        directory: The run directory.
    """

    def __init__(self, config: PlacedConfig, flow: Flow, directory: Path) -> None:
        self._config = config
        self._path = directory / PROFILE_FILE
        self._recorder = new_recorder(config, flow, f"first steps of run {directory.name}")

    def after_step(self, step: int, report: StepReport, seconds: float) -> None:
        """Take the next step and its time; the profile is written when there are enough."""
        del step
        if self._recorder.count >= FIRST_STEPS:
            return
        self._recorder.observe(report, seconds)
        if self._recorder.count == FIRST_STEPS:
            found = fingerprints(self._config).profile(
                self._recorder.profiles(), overhead([beside(self._recorder)])
            )
            try:
                found.save(self._path)
            except OSError as error:  # a full disk is no reason to stop training
                log.warning("%s was not written: %s", self._path, error.strerror)


log = logging.getLogger(__name__)


@dataclass
class Setting:
    """One placement, and what steps under it took.

    Args:
        label: What is special about it.
        config: The run under it.
        recorder: What its components took.
        seconds: Time of each step that counts.
    """

    label: str
    config: PlacedConfig
    recorder: StepRecorder
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median time of a step [s]."""
        return median(self.seconds)

    @classmethod
    def of(cls, label: str, config: PlacedConfig, flow: Flow) -> Self:
        """A placement, before its first step."""
        return cls(label, config, new_recorder(config, flow, f"{label}, in a run"))


def fastest(settings: Sequence[Setting]) -> Setting:
    """The one with the shortest steps; none that offloads what another keeps on the same devices.

    A switch never saves time, so such a one was faster by chance. What is kept did fit: it ran.
    """
    plans = [setting.config.plan for setting in settings]
    sensible = [
        setting
        for setting in settings
        if not any(setting.config.plan.switches_more_than(plan) for plan in plans)
    ]
    return min(sensible, key=lambda setting: setting.median)


def kept_costs(settings: Sequence[Setting], before: Profile | None, directory: Path) -> Profile:
    """Everything that is known of a recipe's costs, written for the page and for later runs.

    Args:
        settings: What was measured; what was measured last counts.
        before: What was known before.
        directory: The run directory.
    """
    config = settings[-1].config
    found = merged(setting.recorder.profiles() for setting in settings)
    besides = overhead([beside(setting.recorder) for setting in settings], before)
    components = found if before is None else renewed(before.components, found)
    profile = fingerprints(config).profile(components, besides)
    try:
        profile.save(directory / PROFILE_FILE)
        keep_profile(profile, config.task)
    except OSError as error:  # a full disk is no reason to stop training
        log.warning("the profile was not written: %s", error.strerror)
    return profile
