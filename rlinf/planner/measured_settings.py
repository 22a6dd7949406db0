"""Placements that a run was under, what its steps took there, and what is known by them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.planner.kept_profiles import fingerprints, keep_profile
from rlinf.planner.measure import PROFILE_FILE, StepRecorder, merged, renewed
from rlinf.planner.overhead import overhead
from rlinf.planner.profile import Profile
from rlinf.planner.recording import beside, new_recorder

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
