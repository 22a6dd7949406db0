"""Trials of a recipe, kept profiles, and what makes them invalid."""

from __future__ import annotations

import fcntl
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import ConfigError
from rlinf.flow.executor import StepReport
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import ComponentPlan
from rlinf.monitor.run_directory import RunDirectory
from rlinf.planner import kept_profiles, planned, profiling
from rlinf.planner.planned import command_overrides
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.run import Run
from rlinf.scheduler.component_grammar import parse_component_placement
from tests.runners import reasoning_support, support

SLOTS = "cluster.cpu_devices_per_node=2"


@pytest.fixture(autouse=True)
def _two_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_every_part_of_a_recipe_is_measured_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = support.small_config(tmp_path, SLOTS)
    lines: list[str] = []
    begin = time.perf_counter()
    profile = profiling.measure(
        config, partial(Run, Embodied), Embodied.flow, steps=2, say=lines.append
    )
    seconds = time.perf_counter() - begin
    assert set(profile.components) == {"env", "rollout", "actor"}
    sizes = {
        (m.items, m.devices, m.pipeline_stages) for m in profile.components["env"].measurements
    }
    assert {(8, 1, 1), (4, 1, 1), (8, 2, 1), (8, 1, 2)} <= sizes
    total = sum(
        m.seconds * m.samples for part in profile.components.values() for m in part.measurements
    )
    assert 0 < total < seconds
    assert all(
        m.samples >= 2 and m.origin
        for part in profile.components.values()
        for m in part.measurements
    )
    assert len(lines) == len(set(lines)) >= 5
    assert "the recipe as it is" in lines[0]


def test_a_trial_that_fails_leaves_what_the_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = support.small_config(tmp_path, SLOTS)
    trials = [t for t in planned.legal_trials(config) if t[1].planning.items == 8][:2]
    monkeypatch.setattr(profiling, "legal_trials", lambda config: iter([*trials, trials[1]]))
    started: list[int] = []

    def build(*arguments: Any) -> Run:
        started.append(len(started))
        if started[-1] == fails:
            raise RuntimeError("out of memory")
        return Run(Embodied, *arguments)

    lines: list[str] = []
    fails = 1
    profile = profiling.measure(config, build, Embodied.flow, steps=1, say=lines.append)
    assert set(profile.components) == {"env", "rollout", "actor"}
    assert started == [0, 1, 2]
    assert lines[1] == f"{trials[1][0]} could not be measured: RuntimeError: out of memory"
    assert [step.plan for step in profile.steps] == [
        trial.plan.written() for _, trial in (trials[0], trials[1])
    ]
    assert kept_profiles.measured_step(config, profile) == profile.steps[0].seconds
    other = support.small_config(tmp_path, SLOTS, "env.num_envs=16")
    assert kept_profiles.measured_step(other, profile) is None
    # Of equal settings the later one is kept.
    kept_profiles.keep_profile(profile, "embodied")
    newer = profile.steps[0].model_copy(update={"seconds": 7.0})
    kept_profiles.keep_profile(profile.model_copy(update={"steps": (newer,)}), "embodied")
    kept, _ = kept_profiles.usable_profile(config)
    assert kept is not None
    assert kept.steps == (profile.steps[1], newer)
    started.clear()
    fails = 0
    with pytest.raises(RuntimeError, match="out of memory"):
        profiling.measure(config, build, Embodied.flow, steps=1, say=lines.append)


def test_directories_of_killed_trials_are_removed_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, living, other = (tmp_path / f"{name}" for name in ("rlinf-trials-a", "rlinf-trials-b",
                                                               "of-others"))  # fmt: skip
    for each in (killed, living, other):
        (each / "0").mkdir(parents=True)
    monkeypatch.setattr(profiling, "legal_trials", lambda config: iter(()))
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="could be measured"):
        profiling.measure(support.small_config(tmp_path), partial(Run, Embodied), Embodied.flow)
    os.close(descriptor)
    assert {each.name for each in tmp_path.iterdir()} >= {living.name, other.name}
    assert not killed.exists()
    assert len([*tmp_path.glob("rlinf-trials-*")]) == 1


def test_a_kept_profile_is_used_until_something_differs(tmp_path: Path) -> None:
    config = support.small_config(tmp_path)
    assert kept_profiles.usable_profile(config) == (None, ())
    recorder = kept_profiles.new_recorder(config, Embodied.flow(config), "a test")
    recorder.warm_up = 0
    for report in _rehearsed(config, tmp_path, 2):
        recorder.observe(report)
    # What a process has measured travels to another one.
    recorder = pickle.loads(pickle.dumps(recorder))
    profile = kept_profiles.fingerprints(config).profile(recorder.profiles())
    kept_profiles.keep_profile(profile, "embodied")
    kept, why = kept_profiles.usable_profile(config)
    assert (kept, why) == (profile, ())

    for overrides, what in (
        (("model.hidden_sizes=[8]",), "model.hidden_sizes is [8], "),
        (("actor.update_epoch=1",), "actor.update_epoch is 1, "),
        ((SLOTS,), "hardware"),
    ):
        changed = support.small_config(tmp_path, *overrides)
        kept, why = kept_profiles.usable_profile(changed)
        assert kept is None
        assert any(text.startswith(what) for text in why), why
    # Seeds, lengths, numbers of items and placements do not matter.
    same = support.small_config(
        tmp_path, "seed=5", "runner.total_env_steps=4096", "env.num_envs=16"
    )
    assert kept_profiles.usable_profile(same)[0] == profile


def _rehearsed(config: EmbodiedConfig, path: Path, steps: int) -> Iterator[StepReport]:
    with RunDirectory.create(path, "small", path=path / "rehearsal") as directory:
        runner = Run(Embodied, config, directory, threading.Event())
        yield from (report for report, _ in runner.rehearse(steps))


@pytest.mark.parametrize("ahead", [0, 1])
def test_more_steps_can_be_measured_than_a_run_has(tmp_path: Path, ahead: int) -> None:
    one_step = ("runner.total_env_steps=128", f"rollout.max_staleness={ahead}")
    reports = list(_rehearsed(support.small_config(tmp_path, *one_step), tmp_path, 3))
    assert len(reports) == 3
    assert all(report.stages.keys() == reports[0].stages.keys() for report in reports)


def test_measurements_of_a_second_time_join_the_first(tmp_path: Path) -> None:
    config = support.small_config(tmp_path)
    here = kept_profiles.fingerprints(config)
    flow = Embodied.flow(config)
    recorder = kept_profiles.new_recorder(config, flow, "first")
    recorder.warm_up = 0
    reports = list(_rehearsed(config, tmp_path, 1))
    recorder.observe(reports[0])
    kept_profiles.keep_profile(here.profile(recorder.profiles()), "embodied")
    recorder.items = 4
    kept_profiles.keep_profile(here.profile(recorder.profiles()), "embodied")
    kept, _ = kept_profiles.usable_profile(config)
    assert kept is not None
    assert [m.items for m in kept.components["env"].measurements] == [4, 8]
    # One that cannot be read is replaced.
    path = kept_profiles.keep_profile(kept, "embodied")
    for damaged in (b'{"hardware": 1}', b"\xff\xfe\x00"):
        path.write_bytes(damaged)
        assert kept_profiles.usable_profile(config)[0] is None
    kept_profiles.keep_profile(kept, "embodied")
    assert kept_profiles.usable_profile(config)[0] == kept


def test_trials_of_a_language_model_are_legal_recipes(tmp_path: Path) -> None:
    config = reasoning_support.small_config(tmp_path, SLOTS)
    trials = dict(planned.legal_trials(config))
    assert {trial.planning.items for trial in trials.values()} >= {16, 8}
    assert any(len(t.plan.components["rollout"].devices) == 2 for t in trials.values())
    assert all(t.plan.components["actor"].processes == 1 for t in trials.values())
    assert config.planning.constraints.group_size == 4


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_the_switch_of_what_can_leave_a_device_is_measured_on_cpu_slots_too(
    tmp_path: Path, devices: int, staleness: int, runtime: str
) -> None:
    words = (
        f"cluster.cpu_devices_per_node={devices}", f"rollout.max_staleness={staleness}",
        f"cluster.runtime={runtime}",
    )  # fmt: skip
    config = reasoning_support.small_config(tmp_path, *words)
    for places in (planned.legal_trials, planned.legal_placements):
        trial = dict(places(config))["offloaded while idle"].plan
        away = {name for name, part in trial.components.items() if part.residency == "offload"}
        # An engine that runs ahead keeps its weights.
        assert away == ({"actor"} if staleness else {"rollout", "actor"})
        assert trial.overlap(("rollout",), ("actor",))


@pytest.mark.parametrize("places", [planned.legal_trials, planned.legal_placements])
def test_what_is_the_same_for_another_reason_is_measured_once(
    tmp_path: Path, places: Callable[[PlacedConfig], Iterator[tuple[str, PlacedConfig]]]
) -> None:
    # What shares the accelerator is offloaded, by hand or not.
    config = reasoning_support.small_config(tmp_path, "cluster.accelerators_per_node=1")
    labels = [label for label, _ in places(config)]
    assert "offloaded while idle" not in labels


@pytest.mark.parametrize(
    ("devices", "processes"),
    [
        ((0,), 1),
        ((0, 1), 2),
        ((0, 1), 1),
        ((0, 1), 4),
        ((0, 2, 3), 3),
        ((0, 1, 4, 5), 2),
        ((3,), 2),
    ],
)
def test_a_plan_is_written_as_a_placement_that_means_it(
    devices: tuple[int, ...], processes: int
) -> None:
    text = ComponentPlan(devices=devices, processes=processes).placement
    [entry] = parse_component_placement({"a": text})
    assigned = entry.processes(8)
    assert len(assigned) == processes
    assert {d for own in assigned for d in own} == set(devices)
    assert len({len(own) for own in assigned}) == 1


def test_a_recipe_with_the_overrides_of_a_plan_has_that_plan(tmp_path: Path) -> None:
    config = support.small_config(
        tmp_path, SLOTS, "cluster.component_placement={env: '0', rollout: '1', actor: '0-1'}",
        "rollout.pipeline_stage_num=2",
    )  # fmt: skip
    bare = support.small_config(tmp_path, SLOTS)
    plain = support.small_config(tmp_path, SLOTS, *command_overrides(bare, config.plan))
    assert plain.plan.same_places(config.plan)


@pytest.mark.parametrize(
    ("overrides", "streams"),
    [
        ((), False),
        (("actor.shuffle=false",), True),
        (("actor.shuffle=false", "actor.update_epoch=2"), False),
    ],
)
def test_a_trainer_streams_where_it_trains_on_parts(
    overrides: tuple[str, ...], streams: bool, tmp_path: Path
) -> None:
    config = reasoning_support.small_config(tmp_path, *overrides)
    limits = config.planning.constraints
    assert limits.of("actor").streams is streams
    assert limits.considered() == ((8, 16) if streams else (16,))
