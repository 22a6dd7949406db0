"""From step reports to measurements: what counts, what does not, and how trials are merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlinf.flow.executor import StepReport
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.flow.stage_worker import StageCost, StageReport
from rlinf.planner.kept_profiles import hardware_fingerprint, hashed
from rlinf.planner.measure import (
    OverheadRecorder,
    StepRecorder,
    first_result_share,
    merged,
    overhead,
    renewed,
)
from rlinf.planner.profile import ComponentProfile, Fingerprints, Measurement, Overhead, Profile

NO_SWITCH = {"onload_seconds": None, "offload_seconds": None}
FLOW = Flow("train")
FLOW.loop("rollout", Stage("env", "act", ("b",), ("a",)), Stage("policy", "answer", ("a",), ("b",)))
FLOW.stage("train", Stage("actor", "train"))


def stage(
    seconds: float, waiting: float = 0.0, transfer: float = 0.0, peak: int = 0, resident: int = 0,
    onload: float = 0.0, offload: float = 0.0,
) -> StageReport:  # fmt: skip
    cost = StageCost(
        onload_seconds=onload, offload_seconds=offload, transfer_seconds=transfer,
        peak_bytes=peak, resident_bytes=resident, switched=bool(onload or offload),
    )  # fmt: skip
    return StageReport(
        result=None, seconds=seconds + waiting + transfer + onload + offload,
        seconds_waiting=waiting, items_in=1, items_out=1, events=[], cost=cost,
    )  # fmt: skip


def recorder(warm_up: int = 0, **plans: ComponentPlan) -> StepRecorder:
    plan = Plan(
        components=plans
        or {
            "env": ComponentPlan(devices=(0,), processes=2, pipeline_stages=2),
            "actor": ComponentPlan(devices=(0, 1), processes=2),
        }
    )
    owners = {"env": "env", "inference": "actor", "actor": "actor"}
    return StepRecorder(
        plan, owners, items=16, origin="a test", warm_up=warm_up,
        overhead=OverheadRecorder(FLOW, plan, {"rollout": 4}),
    )  # fmt: skip


def step(env: float, inference: float, train: float, synchronise: float = 0.1) -> StepReport:
    """Two env workers of which the second is slower, and an actor with two stages."""
    stages = {
        "env": [stage(env / 2, waiting=9.0), stage(env, waiting=1.0, transfer=0.32, peak=100)],
        "inference": [stage(inference, onload=0.25, peak=7), stage(inference / 3)],
        "actor": [stage(train, offload=0.5, peak=3, resident=2), stage(train)],
    }
    return StepReport(stages, [], synchronise)


def test_measurements_say_on_what_kind_of_device_they_were_taken() -> None:
    taken = recorder()
    taken.device_kinds = {"env": "cpu"}
    taken.observe(step(1.0, 0.5, 1.0))
    found = taken.profiles()
    assert (found["env"].kinds, found["actor"].kinds) == (("cpu",), ("",))


def test_the_median_of_the_slowest_worker_and_its_spread() -> None:
    taken = recorder()
    times = [1.0, 2.0, 3.0, 4.0, 10.0]
    for seconds in times:
        taken.observe(step(seconds, 0.5, 1.0))
    [measured] = taken.profiles()["env"].measurements
    assert measured.seconds == pytest.approx(3.0)
    assert measured.spread == pytest.approx(np.subtract(*np.percentile(times, [75, 25])))
    assert (measured.samples, measured.items, measured.devices) == (5, 16, 1)
    assert measured.pipeline_stages == 2
    assert measured.origin == "a test"
    assert overhead([taken.overhead]).synchronisation_seconds == pytest.approx(0.1)


def test_first_steps_warm_up_and_do_not_count() -> None:
    taken = recorder(warm_up=2)
    for seconds in (100.0, 50.0):
        taken.observe(step(seconds, 1.0, 1.0, synchronise=9.0))
        assert taken.profiles() == {}
    taken.observe(step(1.0, 1.0, 1.0))
    assert taken.count == 1
    assert taken.profiles()["env"].measurements[0].seconds == pytest.approx(1.0)
    assert overhead([taken.overhead]).synchronisation_seconds == pytest.approx(0.1)


def test_stages_of_one_component_add_up_and_loading_counts_apart() -> None:
    taken = recorder()
    taken.observe(step(1.0, 0.5, 2.0))
    actor = taken.profiles()["actor"]
    assert actor.measurements[0].seconds == pytest.approx(2.5)
    assert (actor.onload_seconds, actor.offload_seconds) == pytest.approx((0.25, 0.5))


def test_a_switch_is_measured_where_there_was_one_and_the_newest_counts() -> None:
    taken, slower = recorder(), recorder()
    taken.observe(step(1.0, 0.5, 2.0))
    report = step(1.0, 0.5, 2.0)
    slower.observe(replace(report, stages={**report.stages, "actor": [stage(2.0, onload=0.75)]}))
    first, second = taken.profiles(), slower.profiles()
    assert first["env"].onload_seconds is first["env"].offload_seconds is None
    assert not first["env"].switch_is_measured
    assert first["actor"].switch_is_measured
    assert second["actor"].onload_seconds == pytest.approx(1.0)
    # Among trials the slowest; a trial in which it stayed takes nothing away.
    without = {"actor": first["actor"].model_copy(update=NO_SWITCH)}
    together = merged([second, first, without])
    assert together["actor"].onload_seconds == pytest.approx(1.0)
    assert together["env"].onload_seconds is None
    # What is measured later counts, if it was.
    for later, expected in ((first, 0.25), (without, 1.0)):
        found = renewed(second, later)
        assert found["actor"].onload_seconds == pytest.approx(expected)
        assert found["env"].measurements == second["env"].measurements


def test_parts_of_a_loop_on_one_device_take_no_longer_than_the_loop() -> None:
    """Both work all the time, as each has a sub-batch; the device is busy for 3 s, not for 5."""
    taken = replace(recorder(), sharing={"both": ("env", "actor")})
    for passed in (3.0, 9.0):
        taken.observe(replace(step(2.0, 1.0, 2.0), node_seconds={"both": passed}))
    env, actor = taken.samples["env"], taken.samples["actor"]
    assert [sample.seconds for sample in env] == pytest.approx([1.2, 2.0])
    assert [sample.seconds for sample in actor] == pytest.approx([1.8, 3.0])


def test_memory_of_workers_on_one_device_adds_up() -> None:
    taken = recorder()
    taken.observe(step(1.0, 0.5, 2.0))
    profiles = taken.profiles()
    assert profiles["env"].measurements[0].peak_bytes == 200  # two workers on one device
    assert profiles["actor"].measurements[0].peak_bytes == 7  # one worker per device
    assert profiles["actor"].resident_bytes == 2


def test_memory_is_that_of_the_device_with_the_most_workers() -> None:
    uneven = ComponentPlan.model_validate({"devices": "0:0-2,1:3"})
    taken = recorder(env=uneven, actor=ComponentPlan(devices=(0, 1), processes=2))
    taken.observe(step(1.0, 0.5, 2.0))
    assert taken.profiles()["env"].measurements[0].peak_bytes == 300


def test_handing_over_counts_per_item_of_a_process() -> None:
    taken = recorder()
    taken.observe(step(1.0, 0.5, 2.0))
    # 0.32 s for the 8 items of a process
    assert taken.profiles()["env"].transfer_seconds_per_item == pytest.approx(0.04)


def test_trials_are_merged_by_size_and_the_newest_figure_is_kept() -> None:
    few, many, other = recorder(), recorder(), recorder()
    few.observe(step(5.0, 1.0, 1.0))
    for _ in range(3):
        many.observe(step(2.0, 1.0, 1.0))
    other.items = 8
    other.observe(step(1.0, 1.0, 1.0))
    for order, newest in (([few, many, other], 2.0), ([many, few, other], 5.0)):
        found = merged([each.profiles() for each in order])["env"]
        assert [(m.items, m.seconds) for m in found.measurements] == [
            (8, pytest.approx(1.0)), (16, pytest.approx(newest)),
        ]  # fmt: skip


def test_trials_with_other_numbers_of_processes_on_the_same_devices_stay_apart() -> None:
    actor = ComponentPlan(devices=(0, 1), processes=2)
    found = []
    for processes, seconds in ((4, 1.0), (1, 4.0), (1, 4.5)):
        env = ComponentPlan(devices=(0,), processes=processes)
        taken = recorder(env=env, actor=actor)
        taken.observe(step(seconds, 1.0, 1.0))
        found.append(taken.profiles())
    measured = merged(found, equal="pooled")["env"].measurements
    assert {m.processes: m.seconds for m in measured} == {
        4: pytest.approx(1.0), 1: pytest.approx(4.25),
    }  # fmt: skip


def test_unsaid_processes_are_not_taken_for_one_on_each_device() -> None:
    said = Measurement(items=8, devices=2, processes=2, seconds=1.0, origin="a trial")
    unsaid = said.model_copy(update={"processes": None, "origin": "a publication"})
    of_each = [{"rollout": ComponentProfile(measurements=(each,))} for each in (said, unsaid)]
    assert set(merged(of_each)["rollout"].measurements) == {said, unsaid}


def test_trials_that_follow_each_other_are_pooled() -> None:
    few, many = recorder(), recorder()
    few.observe(step(5.0, 1.0, 1.0))
    for _ in range(3):
        many.observe(step(2.0, 1.0, 1.0))
    found = merged([few.profiles(), many.profiles()], equal="pooled")["env"]
    [measured] = found.measurements
    assert (measured.samples, measured.seconds) == (4, pytest.approx((5 + 3 * 2) / 4))


@pytest.mark.parametrize(
    ("handed_over", "chunks", "share"),
    [
        ([1.0, 2.0, 3.0, 4.0], 4, 0.0),
        ([4.0, 1.0, 1.0, 1.0], 4, 0.999),  # the first source holds all others up
        ([2.5, 3.0, 3.5, 4.0], 4, 0.5),
        ([4.0, 1.0, 1.0, 1.0], 1, 0.0),
    ],
)
def test_late_results_are_a_part_of_the_time(
    handed_over: list[float], chunks: int, share: float
) -> None:
    assert first_result_share(handed_over, chunks) == pytest.approx(share)


def test_fingerprints_say_what_is_different() -> None:
    taken = recorder()
    taken.observe(step(1.0, 1.0, 1.0))
    here = Fingerprints(hardware="2 cores", model="mlp 1a", config="cfg")
    profile = here.profile(taken.profiles(), Overhead(synchronisation_seconds=0.25))
    assert profile.synchronisation_seconds == 0.25
    assert here.differences(profile) == ()
    other = Fingerprints(hardware="4 cores", model="mlp 1a", config="cfg")
    [difference] = other.differences(profile)
    assert "hardware is '4 cores'" in difference
    assert "2 cores" in difference
    third = Fingerprints(hardware="4 cores", model="mlp 2b", config="x")
    assert len(third.differences(profile)) == 3


def test_the_hardware_names_what_computes() -> None:
    import torch

    text = hardware_fingerprint(2, ["numpy", "no-such-package"])
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert f"numpy {np.__version__}" in text
    assert "2 devices" in text
    assert "no-such-package" not in text
    assert hardware_fingerprint(4, []) != hardware_fingerprint(2, [])


def test_equal_data_has_equal_digits() -> None:
    assert hashed({"a": 1, "b": [2, None]}) == hashed({"b": [2, None], "a": 1})
    assert hashed({"a": 1}) != hashed({"a": 2})


def test_what_is_beside_the_work_of_components() -> None:
    plan = Plan(
        components={name: ComponentPlan(devices=(0,), processes=1) for name in ("env", "policy")}
        | {"actor": ComponentPlan(devices=(0, 1), processes=1)}
    )
    taken = OverheadRecorder(FLOW, plan, {"rollout": 4})
    stages = {"env": [stage(1.0, waiting=2.2)], "policy": [stage(2.0)], "actor": [stage(3.0)]}
    for seconds in (6.7, 6.8, 9.0):
        # 0.2 s of the loop's 3.2 s are nobody's work, in 4 exchanges.
        nodes = {"rollout": 3.2, "train": 3.05}
        taken.observe(StepReport(stages, [], 0.1, nodes), seconds)
    found = overhead([taken])
    [exchange] = found.exchanges
    assert (exchange.node, exchange.apart, exchange.devices) == ("rollout", False, 1)
    assert exchange.seconds == pytest.approx(0.05)
    assert found.driver_seconds == pytest.approx(6.8 - 0.1 - 3.2 - 3.0)
    # Nodes that run at the same time do not show what the driver takes.
    apart = plan.model_copy(
        update={
            "components": {**plan.components, "actor": ComponentPlan(devices=(1,), processes=1)}
        }
    )
    beside = OverheadRecorder(FLOW, apart, {"rollout": 4})
    beside.observe(StepReport(stages, [], 0.1, {"rollout": 3.2, "train": 3.05}), 4.0)
    other = exchange.model_copy(update={"apart": True, "seconds": 0.5})
    # Work that takes longer where stages are apart counts as part of their exchanges.
    own, other_work = (
        {
            name: ComponentProfile(
                measurements=(Measurement(items=8, devices=1, seconds=seconds, origin="a test"),)
            )
            for name in ("env", "policy")
        }
        for seconds in (1.5, 1.3)
    )
    taken.count_work_of(own, other_work)
    assert overhead([taken]).exchanges[0].seconds == pytest.approx(0.05 + 2 * 0.2 / 4)
    known = Profile(
        hardware="", model="", config="", driver_seconds=0.3, exchanges=(other,), components={}
    )
    together = known.model_copy(update=dict(overhead([beside], known)))
    assert together.driver_seconds == 0.3
    # An exchange is taken from the setting that is most alike.
    assert together.exchange_seconds("rollout", 4, apart=False) == pytest.approx(0.05)
    assert together.exchange_seconds("rollout", 4, apart=True) == pytest.approx(0.5)
    assert together.exchange_seconds("another", 4, apart=True) == 0
