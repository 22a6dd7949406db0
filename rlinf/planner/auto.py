"""``cluster.plan: auto``: a run that finds its own placement while it trains.

Which placement a step runs under does not change what it computes, so the steps that measure are
training steps like all others. A run goes through these phases:

    measure   some steps under its own placement, then under those that its recipe names as worth
              measuring; skipped where a valid profile of this machine is kept
    try       the plan that the planner finds, if it promises enough, for some steps
    watch     the fastest plan that was measured; all is measured anew where the step time drifts

Every change, with what it cost, promised and brought, is a line of ``decisions.jsonl``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, Self

from rlinf.errors import ConfigError
from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import PLAN_FILE, AutoPlanConfig, Plan, SwitchFailure
from rlinf.monitor.decisions import Decision, What, note_decision
from rlinf.planner.kept_profiles import (
    FirstSteps,
    fingerprints,
    keep_profile,
    new_recorder,
    placed_step,
    usable_profile,
    why_not_kept,
)
from rlinf.planner.measure import PROFILE_FILE, StepRecorder, merged, overhead, renewed
from rlinf.planner.planned import find_accepted_plan, legal_placements
from rlinf.planner.profile import Profile
from rlinf.planner.search import Planned

log = logging.getLogger(__name__)

Switch = Callable[[PlacedConfig], float]
"""Goes on under another placement; returns the seconds that it took, or raises a
:class:`~rlinf.flow.plan.SwitchFailure` and goes on under the one before."""


def step_observer(
    config: PlacedConfig,
    flow: Flow,
    directory: Path,
    *,
    step: int,
    switch: Switch,
    warm_up: Callable[[], None],
) -> AutoPlanner | FirstSteps:
    """What looks at the steps of a run from ``step`` on, by ``after_step(step, report, seconds)``.

    With ``cluster.plan: auto`` it may change the placement; else it leaves a profile behind. See
    :class:`AutoPlanner`; ``config`` is the run under the placement of its recipe.
    """
    policy = config.auto_plan
    if policy is None:
        return FirstSteps(config, flow, directory)
    planner = AutoPlanner(policy, config, flow, directory=directory, switch=switch, warm_up=warm_up)
    planner.begin(step)
    return planner


@dataclass
class Setting:
    """One placement, and what steps under it took: its components, and each step that counts."""

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


class AutoPlanner:
    """Decides, after every step, under which placement the next one runs.

    ``config`` is the run under the placement of its recipe; ``warm_up`` lets the next steps be the
    first ones of a measurement: their memory is watched. A switch does so by itself.
    """

    def __init__(
        self,
        policy: AutoPlanConfig,
        config: PlacedConfig,
        flow: Flow,
        *,
        directory: Path,
        switch: Switch,
        warm_up: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._flow = flow
        self._directory = directory
        self._switch, self._warm_up = switch, warm_up
        self._step = 0
        self._recipe = ("the recipe's placement", config)
        self._setting = Setting.of(*self._recipe, flow)
        self._measured: list[Setting] = []
        self._dropped: list[Plan] = []
        self._waiting: deque[tuple[str, PlacedConfig]] = deque()
        self._phase: Literal["measure", "try", "watch"] = "measure"
        self._profile: Profile | None = None
        self._overlap_factor = 1.0
        self._recent: deque[float] = deque(maxlen=policy.window)
        self._accepted: float | None = None

    def begin(self, step: int) -> None:
        """Note the placement that the run begins with, after so many steps."""
        self._step = step
        self._decide("start", "the placement of the recipe", plan=self._setting.config.plan)
        known, _ = usable_profile(self._setting.config)
        if known is not None:
            self._overlap_factor = known.overlap_factor
        self._measure(known)

    def after_step(self, step: int, report: StepReport, seconds: float) -> None:
        """Take the report and the time of the last of so many steps, and change the placement."""
        self._step = step
        if self._phase == "watch":
            self._watch(seconds)
            return
        setting = self._setting
        setting.recorder.observe(report, seconds)
        if setting.recorder.count:
            setting.seconds.append(seconds)
        if len(setting.seconds) < self._policy.steps:
            return
        self._measured.append(setting)
        if self._phase == "try":
            self._judge()
        else:
            self._measure_next()

    # -- measuring ------------------------------------------------------------------------------

    def _measure(self, known: Profile | None) -> None:
        """Begin to measure: this placement, and others where no profile is ``known`` to hold."""
        config = self._setting.config
        self._setting = Setting.of(self._setting.label, config, self._flow)
        self._phase, self._measured, self._profile = "measure", [], known
        trials = [] if known else [self._recipe, *legal_placements(self._recipe[1])]
        self._waiting = deque(
            (label, trial)
            for label, trial in trials
            if not trial.plan.same_places(config.plan) and not self._was_dropped(trial)
        )
        self._warm_up()

    def _measure_next(self) -> None:
        """Measure the next trial that starts; plan where none does."""
        before = self._setting
        while self._waiting:
            label, config = self._waiting.popleft()
            if self._change(label, config):
                self._decide(
                    "profile",
                    f"measures {label}; {before.label} took {before.median:.3g} s per step",
                    cost=self._cost,
                    numbers={"step_seconds": before.median},
                    plan=config.plan,
                )
                return
        self._plan()

    # -- planning -------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Solve, and try the plan where it promises enough."""
        profile = self._keep_costs()
        best = fastest(self._measured)
        begin = time.perf_counter()
        try:
            solved = find_accepted_plan(self._setting.config, self._flow, profile)
        except ConfigError as error:
            self._stay(best, f"no plan: {error}", time.perf_counter() - begin)
            return
        cost = time.perf_counter() - begin
        config, found = solved.config, solved.found
        if solved.passed_over:
            self._decide("refuse", solved.passed_over)
        if any(s.config.plan.same_places(config.plan) for s in self._measured):
            self._stay(best, "the plan that was found is one that was measured", cost, found)
        elif self._was_dropped(config):
            self._stay(best, "the plan that was found did not start before", cost, found)
        elif found.seconds > (1 - self._policy.least_gain) * best.median:
            why = f"the best plan is predicted to take {found.seconds:.3g} s per step"
            why += _assumed(found)
            self._stay(best, why, cost, found)
        else:
            self._try(config, found, best)

    def _keep_costs(self) -> Profile:
        """Everything that is known of the costs, written for the page and for later runs.

        What components take that work at the same time is more than each takes alone: it counts
        here, for sizes of which nothing else is known, and is not kept.
        """
        config, before = self._setting.config, self._profile
        recorders = [setting.recorder for setting in self._measured]
        alone = [recorder for recorder in recorders if not recorder.overhead.runs_ahead]
        components = merged(recorder.profiles() for recorder in alone)
        beside = overhead([recorder.overhead for recorder in alone or recorders], before)
        if before is not None:
            components = renewed(before.components, components)
        steps = tuple(placed_step(s.config, s.median, s.recorder.origin) for s in self._measured)
        beyond = {"overlap_factor": self._overlap_factor, "steps": steps}
        kept = fingerprints(config).profile(components, beside).model_copy(update=beyond)
        ahead = merged(recorder.profiles() for recorder in recorders if recorder not in alone)
        every = {"components": merged([ahead, components])}
        profile = kept.model_copy(update=every)
        try:
            profile.save(place := self._directory / PROFILE_FILE)
        except OSError as error:  # a full disk is no reason to stop training
            log.warning("%s was not written: %s", place, error.strerror)
        if alone:
            self._keep(kept)
        return profile

    def _keep(self, profile: Profile) -> None:
        """Keep a profile for later runs, where they are kept and can be written."""
        try:
            keep_profile(profile, self._setting.config.task)
        except OSError as error:
            log.warning("the profile was not kept for later runs: %s", why_not_kept(error))

    def _try(self, config: PlacedConfig, found: Planned, best: Setting) -> None:
        if not self._change("the planner's placement", config):
            self._stay(best, "the plan that was found did not start", 0.0, found)
            return
        self._phase, self._promise = "try", found
        self._decide(
            "switch",
            f"{found.shape}: {found.seconds:.3g} s per step predicted{_assumed(found)}, "
            f"{best.label} took {best.median:.3g} s",
            cost=self._cost,
            predicted=best.median - found.seconds,
            numbers={"step_seconds_predicted": found.seconds, "step_seconds_before": best.median},
            plan=config.plan,
        )

    def _judge(self) -> None:
        """Keep the plan that was tried if it measured faster than all others, else go back."""
        tried = self._setting
        best = fastest(self._measured[:-1])
        gain = best.median - tried.median
        numbers = {
            "step_seconds_predicted": self._promise.seconds,
            "step_seconds_measured": tried.median,
            "step_seconds_before": best.median,
        }
        promised = best.median - self._promise.seconds
        self._keep_costs()
        took = f"{best.label} took {best.median:.3g} s"
        said = f"measured {tried.median:.3g} s per step"
        if gain >= self._policy.least_gain * best.median:
            self._decide(
                "keep", f"{said}, {took}", predicted=promised, measured=gain, numbers=numbers
            )
        elif self._change(best.label, best.config):
            self._decide(
                "return",
                f"{said}; {took}",
                cost=self._cost,
                predicted=promised,
                measured=gain,
                numbers=numbers,
                plan=best.config.plan,
            )
        self._settle()

    def _stay(self, best: Setting, why: str, cost: float, found: Planned | None = None) -> None:
        """Go on under the fastest placement that was measured."""
        if best is not self._setting and self._change(best.label, best.config):
            cost += self._cost
        numbers = {"step_seconds_before": best.median}
        if found is not None:
            numbers["step_seconds_predicted"] = found.seconds
        self._decide(
            "stay",
            f"{why}; the fastest measured is {best.label} with {best.median:.3g} s per step",
            cost=cost,
            numbers=numbers,
            plan=self._setting.config.plan,
        )
        self._settle()

    # -- watching -------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._phase, self._accepted = "watch", None
        self._recent.clear()

    def _watch(self, seconds: float) -> None:
        self._recent.append(seconds)
        if len(self._recent) < self._policy.window:
            return
        now = median(self._recent)
        if self._accepted is None:
            self._accepted = now
        elif abs(now / self._accepted - 1) > self._policy.drift:
            self._decide(
                "replan",
                f"the last {self._policy.window} steps took {now:.3g} s, "
                f"{100 * (now / self._accepted - 1):+.0f} % of {self._accepted:.3g} s when the "
                "plan was kept",
                numbers={"step_seconds": now, "step_seconds_before": self._accepted},
            )
            # What was measured before the drift, and is kept by now, speaks of other times.
            self._measure(None)

    # -- changing -------------------------------------------------------------------------------

    def _change(self, label: str, config: PlacedConfig) -> bool:
        """Go on under another placement; False where it did not start, and this one goes on."""
        try:
            self._cost = self._switch(config)
        except SwitchFailure as failure:
            self._dropped.append(config.plan)
            why = f"{label} did not start, {self._setting.label} goes on: {failure}"
            self._decide("drop", why, cost=failure.seconds)
            return False
        self._setting = Setting.of(label, config, self._flow)
        return True

    def _was_dropped(self, config: PlacedConfig) -> bool:
        return any(plan.same_places(config.plan) for plan in self._dropped)

    def _decide(
        self,
        what: What,
        reason: str,
        *,
        cost: float | None = None,
        predicted: float | None = None,
        measured: float | None = None,
        numbers: dict[str, float] | None = None,
        plan: Plan | None = None,
    ) -> None:
        decision = Decision(
            step=self._step,
            what=what,
            reason=reason,
            cost_seconds=cost,
            gain_predicted=predicted,
            gain_measured=measured,
            numbers=numbers or {},
            plan=None if plan is None else plan.model_dump(mode="json"),
        )
        note_decision(self._directory, decision)
        if plan is not None:
            try:
                plan.save(self._directory / PLAN_FILE)
            except OSError as error:  # a full disk is no reason to stop training
                log.warning("%s was not written: %s", PLAN_FILE, error.strerror)


def _assumed(found: Planned) -> str:
    """What a prediction rests on that was not measured, in words; empty: nothing."""
    return f" (not measured: {'; '.join(found.extended)})" if found.extended else ""
