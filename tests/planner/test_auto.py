"""A run that changes its placement by itself computes the same, and tells what it did."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.component import illegal
from rlinf.config.dump import to_yaml
from rlinf.errors import ConfigError
from rlinf.flow.stage_worker import StageCost
from rlinf.monitor.decisions import Decision, read_decisions
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner import auto as auto_plan
from rlinf.planner import kept_profiles, planned
from rlinf.planner.measure import PROFILE_FILE
from rlinf.planner.profile import ComponentProfile, Measurement, Profile, ScalingLaw
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.groups import Groups
from rlinf.runners.run import Run
from tests.runners import reasoning_support
from tests.runners.support import assert_equal_runs, small_config

SPLIT = ("rollout.block_size=4", "cluster.cpu_devices_per_node=2", "runner.total_env_steps=3072")
AUTO = "cluster.plan={auto: {steps: 1, least_gain: 0.0}}"
AHEAD = (
    "rollout.max_staleness=1", "cluster.plan={auto: {steps: 2, least_gain: 0.9}}",
    "cluster.component_placement={'env,rollout': '0', actor: '1'}",
)  # fmt: skip

Times = dict[str, dict[int, float]]
"""Seconds of each component by its number of devices."""
FAST: Times = {"env": {1: 4.0, 2: 2.0}, "rollout": {1: 1.0, 2: 1.0}, "actor": {1: 1.0, 2: 1.5}}
SHARED: Times = {**FAST, "actor": {1: 9.0, 2: 4.5}}
CROWDED: Times = {**FAST, "actor": {1: 9.0, 2: 20.0}}


def two_slots(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))


@pytest.fixture(autouse=True)
def _two_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two_slots(monkeypatch, tmp_path)


def train(directory: Path, *overrides: str) -> Path:
    directory.mkdir()
    config = small_config(
        directory, *SPLIT, "evaluation.interval=0", "evaluation.stop_at_success=null", *overrides
    )
    with RunDirectory.create(directory, "small", path=directory / "run") as run:
        Run(Embodied, config, run, threading.Event()).run()
    return run.path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under the placement of the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        two_slots(patch, tmp_path_factory.mktemp("cache"))
        return train(tmp_path_factory.mktemp("runs") / "plain")


def kinds(decisions: list[Decision]) -> list[str]:
    return [decision.what for decision in decisions]


@pytest.mark.slow
def test_training_is_the_same_to_the_bit_under_every_placement_it_tries(
    tmp_path: Path, plain: Path
) -> None:
    auto = train(tmp_path / "auto", AUTO)
    assert_equal_runs(plain, auto)

    decisions = read_decisions(auto)
    assert kinds(decisions)[0] == "start"
    assert kinds(decisions).count("profile") >= 2
    assert kinds(decisions)[-1] in ("stay", "keep", "return")
    plans = [decision.plan for decision in decisions if decision.plan is not None]
    assert len({str(plan) for plan in plans}) >= 3
    changes = [d for d in decisions if d.what in ("profile", "switch", "return")]
    assert all(d.cost_seconds is not None and d.cost_seconds > 0 for d in changes)
    # What was measured is kept, so that the next run plans at once.
    config = small_config(tmp_path, *SPLIT)
    kept, why = kept_profiles.usable_profile(config)
    assert kept is not None, why
    again = read_decisions(train(tmp_path / "again", AUTO, "runner.total_env_steps=768"))
    assert "profile" not in kinds(again)
    assert kinds(again)[1] in ("stay", "switch")


@pytest.mark.parametrize("method", ["_start", pytest.param("load_state", marks=pytest.mark.slow)])
def test_a_placement_that_does_not_start_is_dropped(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(Groups, method)
    steps = []

    def out_of_memory(system: Groups, *arguments: Any) -> None:
        original(system, *arguments)
        if system._plan.components["actor"].processes == 2:
            committed = (tmp_path / "auto" / "run" / "checkpoints").glob("step_*")
            steps.append(len(list(committed)))
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Groups, method, out_of_memory)
    auto = train(tmp_path / "auto", AUTO, "checkpoint={interval: 0}")
    assert_equal_runs(plain, auto)
    assert steps
    assert all(steps)
    dropped = [d for d in read_decisions(auto) if d.what == "drop"]
    # What did not start is not tried again.
    assert len({d.reason for d in dropped}) == len(dropped) == len(steps)
    assert "goes on: RuntimeError: out of memory" in dropped[0].reason


def test_after_the_last_step_no_placement_is_tried(tmp_path: Path) -> None:
    # Two steps warm up, the third would end the measurement.
    run = train(tmp_path / "short", AUTO, "runner.total_env_steps=384")
    assert kinds(read_decisions(run)) == ["start"]
    longer = train(tmp_path / "longer", AUTO, "runner.total_env_steps=512")
    assert len(read_decisions(longer)) > 1


class _StopAt(threading.Event):
    """Asks a run to stop once it has written so many lines of metrics."""

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__()
        self._path, self._lines = path, lines

    def is_set(self) -> bool:
        written = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0
        return written >= self._lines


class _Switches:
    """Stands where a runner changes the placement, and says how long steps take there."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def __call__(self, config: Any) -> float:
        self.configs.append(config)
        return 0.5


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of one real step."""
    path = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        two_slots(patch, path)
        with RunDirectory.create(path, "small", path=path / "one") as directory:
            runner = Run(Embodied, small_config(path, *SPLIT), directory, threading.Event())
            found, _ = next(iter(runner.rehearse(1)))
    # What a step took beside its nodes does not fit to the times that the tests make up.
    return replace(found, node_seconds={})


def planner(
    tmp_path: Path,
    switches: _Switches,
    *overrides: str,
    warm_up: Callable[[], None] = lambda: None,
) -> auto_plan.AutoPlanner:
    config = small_config(tmp_path, *SPLIT, *overrides)
    assert config.auto_plan is not None
    directory = tmp_path / "run"
    directory.mkdir()
    found = auto_plan.AutoPlanner(
        config.auto_plan, config, Embodied.flow(config), directory=directory,
        switch=switches, warm_up=warm_up,
    )  # fmt: skip
    found.begin(0)
    return found


def under(config: Any, times: Times) -> dict[str, float]:
    """What each component takes under the placement of a config."""
    placed = config.plan.components
    return {name: by_devices[len(placed[name].devices)] for name, by_devices in times.items()}


def timed(report: Any, taken: dict[str, float]) -> Any:
    """A report of components that took so long."""
    stages = {
        name: [replace(reports[0], seconds=taken[name], seconds_waiting=0.0, cost=StageCost())]
        for name, reports in report.stages.items()
    }
    return replace(report, stages=stages, begin_seconds=0.0)


def run_steps(planner: auto_plan.AutoPlanner, report: Any, first: int, times: list[float]) -> int:
    for number, seconds in enumerate(times, start=first):
        planner.after_step(number, report, seconds)
    return first + len(times)


def keep_a_profile(tmp_path: Path, times: Times, items: int = 8) -> None:
    """Keep what components take for so many environments, founded on many steps."""

    def measured(seconds: dict[int, float]) -> ComponentProfile:
        return ComponentProfile(
            measurements=tuple(
                Measurement(
                    items=items,
                    devices=n,
                    processes=n,
                    seconds=t,
                    samples=99,
                    device_kind="cpu",
                    origin="a test",
                )
                for n, t in seconds.items()
            )
        )

    here = kept_profiles.fingerprints(small_config(tmp_path, *SPLIT))
    parts = {name: measured(seconds) for name, seconds in times.items()}
    kept_profiles.keep_profile(here.profile(parts), "embodied")


def test_a_plan_that_the_recipe_refuses_is_passed_over(
    tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Times = {**FAST, "actor": {1: 1.0, 2: 0.5}}
    keep_a_profile(tmp_path, times)
    usual = timed(report, under(small_config(tmp_path, *SPLIT), times))
    original = EmbodiedConfig.problems

    def no_divided_pair(config: EmbodiedConfig) -> Any:
        """A rule between components, which no constraint of one of them says."""
        yield from original(config)
        if config.world_size("env") == config.world_size("rollout") == 2:
            yield illegal("cluster.component_placement", "divides both", hint="nearest: one")

    monkeypatch.setattr(EmbodiedConfig, "problems", no_divided_pair)
    switches = _Switches()
    found = planner(tmp_path, switches, "cluster.plan={auto: {steps: 2}}")
    run_steps(found, usual, 1, [60.0] * 4)
    [start, refuse, switch] = read_decisions(tmp_path / "run")
    assert (start.what, refuse.what, switch.what) == ("start", "refuse", "switch")
    assert "divides both" in refuse.reason
    tried = switches.configs[0].plan.components
    assert not tried["env"].processes == tried["rollout"].processes == 2


@pytest.mark.parametrize(("measured", "what"), [(7.0, "return"), (5.0, "keep"), (5.95, "return")])
def test_a_plan_is_kept_only_if_it_measures_faster(
    tmp_path: Path, report: Any, measured: float, what: str
) -> None:
    keep_a_profile(tmp_path, FAST)  # environments gain by a second device, the others do not
    switches = _Switches()
    found = planner(tmp_path, switches, "cluster.plan={auto: {steps: 2}}")
    usual = timed(report, under(small_config(tmp_path, *SPLIT), FAST))
    step = run_steps(found, usual, 1, [6.0] * 4)  # two of them warm up
    [start, switch] = read_decisions(tmp_path / "run")
    assert (start.what, switch.what) == ("start", "switch")
    assert switch.gain_predicted == pytest.approx(2.0, abs=0.1)
    assert switches.configs[0].plan.components["env"].devices == (0, 1)
    assert switch.plan is not None
    assert "env-bound" in switch.plan["components"]["env"]["reason"]

    run_steps(found, report, step, [9.0, 9.0, measured, measured])
    last = read_decisions(tmp_path / "run")[-1]
    assert last.what == what
    assert last.gain_measured == pytest.approx(6.0 - measured)
    assert last.numbers["step_seconds_predicted"] == pytest.approx(4.0, abs=0.1)
    if what == "return":
        assert switches.configs[-1].plan.components["env"].devices == (0,)
    else:
        assert len(switches.configs) == 1


def test_drift_that_persists_makes_a_run_plan_anew(tmp_path: Path, report: Any) -> None:
    warmed_up: list[int] = []
    found = planner(
        tmp_path, _Switches(), "cluster.plan={auto: {steps: 1, window: 5, least_gain: 0.9}}",
        warm_up=lambda: warmed_up.append(len(read_decisions(tmp_path / "run"))),
    )  # fmt: skip
    step = 1
    while kinds(read_decisions(tmp_path / "run"))[-1] != "stay":
        step = run_steps(found, report, step, [1.0] * 3)
        assert step < 100
    step = run_steps(found, report, step, [1.0] * 6)
    # One slow step is no drift, a tenth more is none either.
    step = run_steps(found, report, step, [9.0, 1.0, 1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1])
    assert "replan" not in kinds(read_decisions(tmp_path / "run"))
    run_steps(found, report, step, [1.3] * 6)
    decisions = read_decisions(tmp_path / "run")
    assert "replan" in kinds(decisions)
    drift = decisions[kinds(decisions).index("replan")]
    assert drift.numbers["step_seconds"] == pytest.approx(1.3)
    assert drift.numbers["step_seconds_before"] == pytest.approx(1.0)
    # Memory is watched again, where no switch begins a measurement.
    assert warmed_up == [1, kinds(decisions).index("replan") + 1]


def test_a_decision_says_what_its_prediction_assumes(tmp_path: Path, report: Any) -> None:
    halves = {n: {d: t / 2 for d, t in by_devices.items()} for n, by_devices in FAST.items()}
    keep_a_profile(tmp_path, halves, items=4)
    found = planner(tmp_path, _Switches(), "cluster.plan={auto: {steps: 2}}")
    run_steps(found, timed(report, under(small_config(tmp_path, *SPLIT), FAST)), 1, [6.0] * 4)
    [_, switch] = read_decisions(tmp_path / "run")
    assert switch.what == "switch"
    assert "(not measured: env: 8 items from 4 on 2 devices;" in switch.reason


@pytest.mark.parametrize("actor", [0, 1], ids=["in turns", "at the same time"])
def test_what_components_took_at_the_same_time_is_not_kept(
    tmp_path: Path, report: Any, actor: int
) -> None:
    law = ScalingLaw(lowest=1, highest=64, origin="a test")
    keep_a_profile(tmp_path, FAST)
    known, _ = kept_profiles.usable_profile(small_config(tmp_path, *SPLIT))
    assert known is not None
    parts = {n: part.model_copy(update={"scaling": law}) for n, part in known.components.items()}
    known = known.model_copy(update={"overlap_factor": 1.5, "components": parts})
    kept_profiles.keep_profile(known, "embodied")

    ahead = (*AHEAD, f"cluster.component_placement={{'env,rollout': '0', actor: '{actor}'}}")
    found = planner(tmp_path, _Switches(), *ahead)
    config = small_config(tmp_path, *SPLIT, *ahead)
    slower = {name: 3 * seconds for name, seconds in under(config, FAST).items()}
    run_steps(found, timed(report, slower), 1, [18.0] * 5)
    assert kinds(read_decisions(tmp_path / "run"))[-1] == "stay"
    kept, _ = kept_profiles.usable_profile(small_config(tmp_path, *SPLIT))
    assert kept is not None
    for profile in (kept, Profile.load(tmp_path / "run" / PROFILE_FILE)):
        assert profile.overlap_factor == 1.5
        for name, part in profile.components.items():
            assert part.scaling == law
            [alone] = [m for m in part.measurements if m.devices == 1]
            assert alone.seconds == pytest.approx((1 if actor else 3) * FAST[name][1])


def test_a_run_ahead_of_which_nothing_is_known_plans_by_what_it_sees(
    tmp_path: Path, report: Any
) -> None:
    config = small_config(tmp_path, *SPLIT, *AHEAD)
    found = planner(tmp_path, _Switches(), *AHEAD)
    found._waiting.clear()  # no trial takes turns
    run_steps(found, timed(report, under(config, FAST)), 1, [6.0] * 5)
    assert kinds(read_decisions(tmp_path / "run"))[-1] == "stay"
    seen = Profile.load(tmp_path / "run" / PROFILE_FILE)
    assert seen.components["env"].measurements[0].seconds == pytest.approx(4.0)
    assert kept_profiles.usable_profile(config)[0] is None


class _Machine:
    """Trains under whatever placement a planner chooses; components take turns.

    Args:
        recipe: The placement at the beginning.
        report: Of some step, for its form.
        times: What components take.
    """

    def __init__(self, recipe: Any, report: Any, times: Times) -> None:
        self.switches = _Switches()
        self.times, self._recipe, self._report, self._step = times, recipe, report, 0

    @property
    def config(self) -> Any:
        return self.switches.configs[-1] if self.switches.configs else self._recipe

    def train(self, planner: auto_plan.AutoPlanner, until: Callable[[], bool]) -> None:
        for _ in range(200):
            if until():
                return
            taken = under(self.config, self.times)
            self._step += 1
            report = timed(self._report, taken)
            planner.after_step(self._step, report, sum(taken.values()))
        raise AssertionError("nothing was decided in 200 steps")


@pytest.mark.parametrize(
    ("before", "after", "devices", "last"),
    [
        # The actor gets slower and would gain by both devices: a trial is that plan.
        (FAST, SHARED, (1, 2), "stay"),
        # It gets slower on both of them: no trial is what is best now.
        (SHARED, CROWDED, (2, 1), "keep"),
    ],
    ids=["slower", "slower on two devices"],
)
def test_after_drift_a_run_is_placed_by_what_was_measured_since(
    tmp_path: Path, report: Any, before: Times, after: Times, devices: tuple[int, int], last: str
) -> None:
    keep_a_profile(tmp_path, before)
    config = small_config(tmp_path, *SPLIT)
    machine = _Machine(config, report, before)
    found = planner(tmp_path, machine.switches, "cluster.plan={auto: {steps: 2, window: 4}}")

    def settled(settlements: int) -> Callable[[], bool]:
        ends = ("stay", "keep", "return")

        def found() -> bool:
            return sum(w in ends for w in kinds(read_decisions(tmp_path / "run"))) == settlements

        return found

    machine.train(found, settled(1))
    assert "profile" not in kinds(read_decisions(tmp_path / "run"))  # it is known
    actors = machine.config.plan.components["actor"].devices
    assert len(actors) == devices[0]
    for _ in range(4):  # what it takes is noted
        machine.train(found, _once())
    machine.times = after
    machine.train(found, settled(2))

    placed = machine.config.plan.components
    assert (len(placed["env"].devices), len(placed["actor"].devices)) == (2, devices[1])
    decisions = read_decisions(tmp_path / "run")
    drift = kinds(decisions).index("replan")
    assert kinds(decisions)[-1] == last
    # As many trials as a run without a kept profile makes, the recipe's own placement with them.
    trials = kinds(decisions)[drift:].count("profile")
    assert 1 < trials <= 1 + len(list(planned.legal_placements(config)))
    if last == "keep":
        assert decisions[-1].numbers["step_seconds_predicted"] == pytest.approx(12.0, abs=0.1)
    # Later runs get the new figures, although the old ones were founded on more steps.
    kept, _ = kept_profiles.usable_profile(config)
    assert kept is not None
    actor = {
        m.devices: m.seconds
        for m in kept.components["actor"].measurements
        if m.pipeline_stages == 1
    }
    assert actor == pytest.approx(after["actor"])


def _once() -> Callable[[], bool]:
    """False the first time."""
    asked = iter([False])
    return lambda: next(asked, True)


@pytest.mark.slow
def test_rollouts_that_ran_ahead_are_trained_on_after_a_change(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "rollout.max_staleness=1")
    auto = train(tmp_path / "auto", "rollout.max_staleness=1", AUTO)
    assert_equal_runs(plain, auto)
    assert kinds(read_decisions(auto)).count("profile") >= 2


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_another_placement(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "auto").mkdir()
    words = (*SPLIT, "evaluation.interval=0", "evaluation.stop_at_success=null", AUTO)
    config = small_config(tmp_path / "auto", *words)
    stop = _StopAt(tmp_path / "auto" / "run" / "metrics.jsonl", lines=5)
    with RunDirectory.create(tmp_path, "small", path=tmp_path / "auto" / "run") as run:
        run.write_config(to_yaml(config))
        Run(Embodied, config, run, stop).run()
    # The run stopped under another placement than that of its recipe, with which it begins again.
    plans = [d.plan for d in read_decisions(run.path) if d.plan is not None]
    assert plans[-1] != plans[0]
    with RunDirectory.open(run.path) as run:
        Run(Embodied, config, run, threading.Event()).run(resume=True)
    assert_equal_runs(plain, run.path)


@pytest.mark.slow
def test_a_language_model_trains_the_same_while_it_is_moved(tmp_path: Path) -> None:
    words = ("cluster.cpu_devices_per_node=2", "runner.total_steps=12")
    plain = reasoning_support.train(tmp_path / "plain", *words)
    auto = reasoning_support.train(tmp_path / "auto", *words, AUTO)
    reasoning_support.assert_equal_runs(plain, auto)
    decisions = read_decisions(auto)
    assert any("offloaded while idle" in d.reason for d in decisions if d.what == "profile")
    profile = Profile.load(auto / PROFILE_FILE)
    assert profile.components["rollout"].switch_is_measured
    assert profile.components["actor"].switch_is_measured
    assert not profile.components["reward"].switch_is_measured  # it has nothing to give back


def test_the_word_and_the_section_are_read(tmp_path: Path) -> None:
    assert small_config(tmp_path).auto_plan is None
    assert small_config(tmp_path, "cluster.plan=null").auto_plan is None
    policy = small_config(tmp_path, "cluster.plan=auto").auto_plan
    assert policy is not None
    assert policy.drift == 0.15


def test_another_word_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.plan.*'autp' cannot be read.*a file, or auto"):
        small_config(tmp_path, "cluster.plan=autp")
    with pytest.raises(ConfigError, match=r"has no key `stesp`; did you mean `steps`\?"):
        small_config(tmp_path, "cluster.plan={auto: {stesp: 4}}")


def test_a_disk_that_is_full_does_not_stop_training(
    tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = planner(tmp_path, _Switches(), "cluster.plan={auto: {steps: 1}}")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlinf.monitor.decisions.open", full, raising=False)
    monkeypatch.setattr(auto_plan, "keep_profile", full)
    run_steps(found, report, 1, [1.0] * 12)
    assert "No space left" in caplog.text


def test_where_a_profile_is_not_kept_is_said_with_another_place(
    tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_a_profile(tmp_path, FAST)
    found = planner(tmp_path, _Switches(), "cluster.plan={auto: {steps: 2}}")
    cache = tmp_path / "a file"  # in which not even an administrator can make a directory
    cache.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    run_steps(found, timed(report, under(small_config(tmp_path, *SPLIT), FAST)), 1, [6.0] * 4)
    told = rf"not kept for later runs: {re.escape(str(cache))}/.*: .*XDG_CACHE_HOME names another"
    assert re.search(told, caplog.text)
    assert (tmp_path / "run" / PROFILE_FILE).is_file()
