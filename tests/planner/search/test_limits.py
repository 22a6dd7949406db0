import itertools
import time

import numpy as np
import pytest
from pydantic import ValidationError

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Stage
from rlinf.planner.cluster_shape import ClusterShape, NodeGroup, parse_cluster_shape
from rlinf.planner.profile import ComponentProfile, Measurement, ScalingLaw
from rlinf.planner.search import ComponentConstraint, Constraints, plan, predict
from rlinf.planner.search.pareto import undominated
from tests.planner.simulation.flows import chain, cluster, component, profile


def limits(items=8, **components):
    return Constraints(
        items=items,
        components={name: ComponentConstraint(**values) for name, values in components.items()},
    )


def heavy(seconds, gigabytes, kept=0, **values):
    """Measured on 1, 2 and 4 devices; memory does not shrink with them."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(
                items=8, devices=d, seconds=seconds / d, peak_bytes=gigabytes * 10**9, origin="test"
            )
            for d in (1, 2, 4)
        ),
        resident_bytes=kept * 10**9,
        **values,
    )


def test_nodes_take_turns_where_they_scale_and_stay_if_they_fit():
    measured = profile(a=heavy(8, 30, 10), b=heavy(4, 40, 20))
    found = plan(chain("a", "b"), measured, cluster(4, memory_bytes=80 * 10**9), limits())
    assert found.shape == "a ; b"
    assert found.seconds == pytest.approx(3.0)
    assert {part.residency for part in found.plan.components.values()} == {"resident"}
    assert found.peak_bytes == {"device": 50 * 10**9}


def test_the_switch_is_paid_only_where_memory_needs_it():
    switch = {"onload_seconds": 0.25, "offload_seconds": 0.25}
    measured = profile(a=heavy(8, 50, 40, **switch), b=heavy(4, 60, 10, **switch))
    found = plan(chain("a", "b"), measured, cluster(4, memory_bytes=80 * 10**9), limits())
    # b runs beside what a keeps only if a keeps nothing; a runs beside the 10 GB of b.
    assert found.plan.components["a"].residency == "offload"
    assert found.plan.components["b"].residency == "resident"
    assert found.seconds == pytest.approx(2 + 0.5 + 1)


@pytest.mark.parametrize(
    ("switch", "words"),
    [({}, ("switch of a, taken as 0 s",)), ({"onload_seconds": 0.0, "offload_seconds": 0.0}, ())],
)
def test_a_switch_that_a_plan_needs_and_nobody_measured_is_listed(switch, words):
    measured = profile(a=heavy(8, 50, 40, **switch), b=heavy(4, 60, 10))
    of_b = limits(b={"residency": "resident"})
    found = plan(chain("a", "b"), measured, cluster(4, memory_bytes=80 * 10**9), of_b)
    assert found.plan.components["a"].residency == "offload"
    assert found.extended == words


def test_slow_switching_makes_separate_devices_win():
    switch = {"onload_seconds": 5.0, "offload_seconds": 5.0}
    measured = profile(a=heavy(8, 50, 40, **switch), b=heavy(8, 60, 50, **switch))
    found = plan(chain("a", "b"), measured, cluster(4, memory_bytes=80 * 10**9), limits())
    assert found.plan.mode == "disaggregated"
    assert found.seconds == pytest.approx(4 + 4)


def test_kinds_of_devices_are_used_by_those_measured_on_them():
    def on(kind, seconds):
        return ComponentProfile(
            measurements=tuple(
                Measurement(items=8, devices=d, seconds=seconds / d, device_kind=k, origin="test")
                for k in kind
                for d in (1, 2)
            )
        )

    shape = ClusterShape(
        groups=(
            NodeGroup(nodes=1, devices_per_node=2, kind="H100"),
            NodeGroup(nodes=1, devices_per_node=2, kind="RTX4090"),
        )
    )
    measured = profile(env=on(("RTX4090",), 4.0), actor=on(("H100",), 4.0))
    found = plan(chain("env", "actor"), measured, shape, limits())
    assert found.plan.components["env"].devices == (2, 3)
    assert found.plan.components["actor"].devices == (0, 1)


def on_kind(kind, seconds=8.0):
    """Measured on 1 and 2 devices of one kind."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(items=8, devices=d, seconds=seconds / d, device_kind=kind, origin="test")
            for d in (1, 2)
        )
    )


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ("1x8:H100", "cpu", r"'a' was measured on cpu; the cluster has H100, .* kind out .*: 1x8$"),
        ("1x8:H100,1x8:RTX4090", "cpu", r"'a' was measured on cpu; the cluster has H100, RTX4090"),
        (
            "1x8:H100,1x8:RTX4090",
            "",
            r"'a' was measured on devices without a named kind; the cluster has H100, RTX4090",
        ),
    ],
)
def test_times_on_one_kind_of_device_are_no_prediction_for_another(shape, kind, message):
    with pytest.raises(ConfigError, match=message):
        plan(chain("a"), profile(a=on_kind(kind)), parse_cluster_shape(shape), limits())


def test_a_plan_says_which_figures_name_no_kind():
    costs = profile(a=on_kind(""), b=on_kind("H100"))
    found = plan(chain("a", "b"), costs, parse_cluster_shape("1x2:H100"), limits())
    said = [words for words in found.extended if "name no kind" in words]
    assert said == ["a: figures that name no kind of device, taken for those of H100"]
    alike = plan(chain("b"), costs, parse_cluster_shape("1x2:H100"), limits())
    assert not alike.extended


def test_without_a_kind_a_cluster_has_the_devices_that_were_measured():
    bare = parse_cluster_shape("1x2")
    assert plan(chain("a"), profile(a=on_kind("cpu")), bare, limits()).seconds == 4.0
    with pytest.raises(ConfigError, match=r"figures of H100, cpu, and cluster 1x2 .* 1x2:H100"):
        plan(chain("a", "b"), profile(a=on_kind("cpu"), b=on_kind("H100")), bare, limits())


def test_a_given_plan_on_a_kind_that_was_not_measured_is_not_predicted():
    shape = parse_cluster_shape("1x2:H100,1x2:RTX4090")
    found = plan(chain("a"), profile(a=on_kind("H100")), shape, limits())
    with pytest.raises(ConfigError, match="'a' was not measured on H100; measured on RTX4090"):
        predict(chain("a"), found.plan, profile(a=on_kind("RTX4090")), shape, limits())


def test_no_process_crosses_two_nodes():
    measured = profile(
        a=component(1.0, devices=(1, 2, 3)), b=component(1.0, devices=(4,), fixed=0.1)
    )
    shape = ClusterShape(groups=(NodeGroup(nodes=2, devices_per_node=4),))
    asked = limits(a={"processes": (3,), "even": False}, b={"devices_per_process": 4})
    shares = plan(chain("a", "b"), measured, shape, asked, alternatives=9)
    apart = next(p for p in (shares, *shares.alternatives) if p.plan.mode == "disaggregated")
    # Those of four devices each come first, so that they begin with a node.
    assert apart.plan.components["b"].devices == (0, 1, 2, 3)
    assert apart.plan.components["a"].devices == (4, 5, 6)


def apart_on(devices, flow, **sizes):
    """Where two components are placed that have one process of so many devices, on their own."""
    measured = profile(**{n: component(1.0, devices=(size,)) for n, size in sizes.items()})
    asked = limits(**{n: {"devices_per_process": size} for n, size in sizes.items()})
    found = plan(flow, measured, cluster(devices), asked, alternatives=9)
    plans = [p.plan for p in (found, *found.alternatives) if p.plan.mode == "disaggregated"]
    return [{name: part.devices for name, part in p.components.items()} for p in plans]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("looped", [False, True])
def test_replicas_side_by_side_begin_at_multiples_of_their_size(names, looped):
    flow = chain(*names)
    if looped:
        flow, (one, other) = Flow("test"), names
        flow.loop(
            "loop",
            Stage(one, "run", ("back",), ("forth",)),
            Stage(other, "run", ("forth",), ("back",)),
        )
    # Three devices come first, and two begin at the next even one: 3 is left free.
    assert apart_on(6, flow, a=3, b=2) == [{"a": (0, 1, 2), "b": (4, 5)}]
    if looped:
        with pytest.raises(ConfigError, match="each fit, but not at the same time, on 1x5"):
            apart_on(5, flow, a=3, b=2)
    else:
        assert apart_on(5, flow, a=3, b=2) == []
    # The larger ones come first: behind two devices, four would begin at 4, and end beyond 6.
    assert apart_on(6, flow, a=2, b=4) == [{"a": (4, 5), "b": (0, 1, 2, 3)}]


def test_groups_stay_whole():
    measured = profile(a=component(1.0, items=(2, 4, 8)), b=component(1.0, items=(2, 4, 8)))
    asked = Constraints(items=8, group_size=4)
    assert asked.hand_overs() == (4, 8)
    found = plan(chain("a", "b"), measured, cluster(4), asked)
    assert all(len(part.devices) <= 2 for part in found.plan.components.values())
    assert set(found.hand_overs.values()) <= {4, 8}


def test_what_does_not_stream_gets_all_items_at_once():
    measured = profile(a=component(1.0, devices=(1,)), b=component(1.0, devices=(1,)))
    streaming = plan(chain("a", "b"), measured, cluster(2), limits())
    waiting = plan(chain("a", "b"), measured, cluster(2), limits(b={"streams": False}))
    assert streaming.seconds == pytest.approx(9.0)  # chunks of one item
    assert waiting.seconds == pytest.approx(16.0)


def loop_of_env_and_policy():
    flow = Flow("embodied")
    flow.loop(
        "rollout",
        Stage("env", "interact", ("actions",), ("observations",)),
        Stage("policy", "generate", ("observations",), ("actions",)),
    )
    return flow


def test_who_serves_has_at_most_as_many_processes_as_there_are_sub_batches():
    # Two environments are slower than one, which a policy of two processes could not share.
    def measured(seconds):
        return ComponentProfile(
            measurements=tuple(
                Measurement(items=8, devices=d, seconds=s, origin="test")
                for d, s in seconds.items()
            )
        )

    costs = profile(env=measured({1: 1.0, 2: 1.5}), policy=measured({1: 4.0, 2: 1.0}))
    flow = loop_of_env_and_policy()
    free = plan(flow, costs, cluster(4), limits())
    bound = plan(flow, costs, cluster(4), limits(policy={"serves": "env"}))
    assert [len(p.devices) for p in free.plan.components.values()] == [1, 2]
    # The larger env is slower, and looked at because the policy gains by it.
    assert [len(p.devices) for p in bound.plan.components.values()] == [2, 2]
    assert (free.seconds, bound.seconds) == (pytest.approx(2.0), pytest.approx(2.5))
    with pytest.raises(ConfigError, match="'policy' serves 'actor', which is not in its loop"):
        plan(flow, costs, cluster(4), limits(policy={"serves": "actor"}))


def test_replicas_share_the_items_and_every_rank_is_a_process():
    costs = profile(a=component(1.0, devices=(1, 2, 3, 4, 5, 6)))
    asked = limits(a={"processes_per_replica": 2})
    found = plan(chain("a"), costs, cluster(6), asked).plan.components["a"]
    # Three replicas cannot share 8 items evenly; two have 4 devices, and as many processes.
    assert (len(found.devices), found.processes) == (4, 4)
    with pytest.raises(ConfigError, match="one replica needs 2 devices; 1x1 has 1; nearest: a cl"):
        plan(chain("a"), costs, cluster(1), asked)


def test_processes_also_divide_other_numbers():
    costs = profile(a=component(1.0, devices=(1, 2, 4)))
    of = [
        len(plan(chain("a"), costs, cluster(4), limits(a=given)).plan.components["a"].devices)
        for given in ({}, {"also_divide": (6,)}, {"also_divide": (6, 3)})
    ]
    assert of == [4, 2, 1]


def test_a_loop_pipelines_its_sub_batches():
    flow = Flow("embodied")
    flow.loop(
        "rollout",
        Stage("env", "interact", ("actions",), ("observations", "trajectories")),
        Stage("policy", "generate", ("observations",), ("actions",)),
    )
    flow.stage("train", Stage("actor", "train", ("trajectories",)))
    measured = profile(
        env=component(1.0, devices=(1, 2), fixed=4.0),
        policy=component(1.0, devices=(1, 2), fixed=4.0),
        actor=component(0.5),
    )
    asked = Constraints(
        items=8,
        exchanges={"rollout": 10},
        components={
            "env": ComponentConstraint(pipeline_stages=(1, 2)),
            "policy": ComponentConstraint(pipeline_stages=(1, 2)),
            "actor": ComponentConstraint(streams=False),
        },
    )
    found = plan(flow, measured, cluster(2), asked)
    env = found.plan.components["env"]
    # Shared, one stage: 2 · (4 + 4) = 16. Apart, two stages: (8 + 8) + 1/20 of it: longer.
    assert (env.devices, env.pipeline_stages) == ((0, 1), 1)
    assert found.seconds == pytest.approx(16 + 2)


def test_the_reason_tells_sizes_that_cannot_be_used_from_such_that_were_not_measured():
    measured = profile(a=component(8.0, devices=(1, 2)), b=component(1.0))
    asked = limits(a={"streams": False}, b={"processes": (1,), "streams": False})
    parts = plan(chain("a", "b"), measured, cluster(8), asked).plan.components
    assert parts["a"].devices == (0, 1)
    assert parts["a"].reason.endswith("; more than 2 devices were not measured")
    assert parts["b"].reason.endswith("; 1 device is the most that it can use")


def test_the_reason_says_what_binds_and_what_more_devices_would_bring():
    measured = profile(a=component(8.0), b=component(1.0))
    found = plan(chain("a", "b"), measured, cluster(2), limits())
    assert found.plan.components["a"].reason == (
        "a-bound: 32 s of 36 s; 4 devices instead of 2: -44 %"
    )
    assert (
        found.plan.components["b"].reason == "adds to a: 4 s of 36 s; 4 devices instead of 2: -6 %"
    )


def test_alternatives_are_other_placements_and_not_faster():
    measured = profile(a=component(1.0), b=component(2.0), c=component(1.5))
    found = plan(chain("a", "b", "c"), measured, cluster(4), limits())
    assert len(found.alternatives) == 3
    plans = [{n: p.devices for n, p in f.plan.components.items()} for f in found.alternatives]
    best = {name: part.devices for name, part in found.plan.components.items()}
    assert best not in plans
    assert found.seconds <= min(other.seconds for other in found.alternatives)


@pytest.mark.parametrize(
    ("devices", "memory", "asked", "message"),
    [
        (4, 20, {}, r"'a' needs 30\.0 GB on each of 1 devices; a device has 20\.0 GB"),
        (2, None, {"a": {"devices_per_process": 4}}, r"needs 4 devices; 1x2 has 2; nearest: .* 2"),
        (4, None, {"a": {"processes": (3,)}}, r"8 groups cannot be shared evenly by 3 .* 2, 4"),
        (4, None, {"b": {"processes": (8,)}}, r"'b' was measured on 1 to 4 devices, and no legal"),
        (
            4,
            None,
            {"a": {"device_kinds": ("H100",)}},
            r"run on H100; the cluster has dev.* 1x4:H100",
        ),
        (
            1,
            60,
            {"a": {"residency": "resident"}, "b": {"residency": "resident"}},
            r"keeps a, b resident within the memory of a device; nearest: residency 'offload'",
        ),
    ],
)
def test_an_infeasible_ask_names_the_limit_and_the_nearest_value(devices, memory, asked, message):
    measured = profile(a=heavy(8, 30, 30), b=heavy(4, 40, 40))
    bytes_ = None if memory is None else memory * 10**9
    with pytest.raises(ConfigError, match=message):
        plan(chain("a", "b"), measured, cluster(devices, memory_bytes=bytes_), limits(**asked))


def test_memory_that_fits_on_more_devices_names_how_many():
    shrinking = ComponentProfile(
        measurements=tuple(
            Measurement(
                items=8, devices=d, seconds=8 / d, peak_bytes=160 * 10**9 // d, origin="test"
            )
            for d in (1, 2, 4, 8)
        )
    )
    shape = cluster(2, memory_bytes=50 * 10**9)
    with pytest.raises(ConfigError, match=r"'a' needs 80\.0 GB on each of 2 .*nearest: 4 devices"):
        plan(chain("a"), profile(a=shrinking), shape, limits())


def test_constraints_that_cannot_hold_are_refused():
    with pytest.raises(ValidationError, match=r"30 are not whole groups of 8; nearest: 24, 32"):
        Constraints(items=30, group_size=8)
    with pytest.raises(ValidationError, match=r"nearest: 4"):
        Constraints(items=8, group_size=2, granularities=(5,))
    with pytest.raises(ConfigError, match="no component of flow 'chain'; did you mean `rollout`"):
        plan(chain("rollout"), profile(rollout=component(1.0)), cluster(1), limits(rolout={}))


def three_stages(nodes, group, even):
    """A plan of 8192 sequences on so many nodes of 8 devices, and the processor time it took."""
    law = ScalingLaw(lowest=1, highest=8192, factor_per_doubling=1.02, origin="test")
    sizes = (8, 64, 512, 4096)
    parts = {
        name: component(seconds, devices=(8,), items=sizes, fixed=0.1, scaling=law)
        for name, seconds in (("rollout", 2.0), ("inference", 0.3), ("actor", 1.0))
    }
    shape = parse_cluster_shape(f"{nodes}x8:H100")
    each = {name: ComponentConstraint(even=even) for name in parts}
    asked = Constraints(items=8192, group_size=group, components=each)
    begin = time.process_time()
    found = plan(chain("rollout", "inference", "actor"), profile(**parts), shape, asked)
    seconds = time.process_time() - begin
    print(f"\n{8 * nodes} devices, groups of {group}: {seconds:.2f} s of one core")
    return found, seconds


@pytest.mark.parametrize(("group", "even"), [(16, True), (1, False)])
def test_1024_devices_are_planned_in_the_time_of_a_command(group, even):
    found, seconds = three_stages(128, group, even)
    assert seconds < 5  # a fiftieth of that on an idle machine
    assert found.plan.devices(("rollout", "inference", "actor"))[-1] < 1024
    assert all(words for words in found.extended)


def test_4096_devices_have_a_plan():
    """The law makes all stages faster on more devices: they take turns on all that they can use."""
    uneven, _ = three_stages(512, 1, even=False)
    assert uneven.shape == "rollout ; inference ; actor"
    assert {part.devices for part in uneven.plan.components.values()} == {tuple(range(4096))}
    # 8192 items in groups of 16 can be shared evenly by 512 processes at most, so that no device
    # beyond 512 is of use to one stage: what 1024 devices bring is all that 4096 do.
    grouped, _ = three_stages(512, 16, even=True)
    assert all(len(part.devices) <= 512 for part in grouped.plan.components.values())
    assert grouped.plan.devices(("rollout", "inference", "actor"))[-1] < 4096
    fewer, _ = three_stages(128, 16, even=True)
    assert grouped.seconds == pytest.approx(fewer.seconds)
    assert uneven.seconds < grouped.seconds


def test_undominated_rows_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    # Few values are compared on a grid, many row by row.
    for columns, values in itertools.product((1, 2, 3, 4, 5), (5, 1000)):
        for _ in range(10):
            rows = rng.integers(0, values, (int(rng.integers(1, 60)), columns)).astype(float)
            rows[:, 0] = np.where(rng.random() < 0.5, rows[:, 0], rng.random(len(rows)))
            expected = [
                i
                for i, row in enumerate(rows)
                if not any(
                    (other <= row).all() and ((other < row).any() or j < i)
                    for j, other in enumerate(rows)
                    if j != i
                )
            ]
            assert undominated(rows).tolist() == expected


def test_a_component_of_a_loop_stays_while_the_other_gives_its_memory_back():
    switch = {"onload_seconds": 0.25, "offload_seconds": 0.25}
    flow = Flow("test")
    a = Stage("a", "run", inputs=("scored",), outputs=("items", "groups"))
    b = Stage("b", "run", inputs=("items",), outputs=("scored",))
    flow.loop("loop", a, b)
    flow.stage("c", Stage("c", "run", inputs=("groups",)))
    measured = profile(a=heavy(8, 30, 30, **switch), b=heavy(4, 1, 1), c=heavy(8, 60, **switch))
    of_b = limits(b={"residency": "resident"})
    found = plan(flow, measured, cluster(1, memory_bytes=80 * 10**9), of_b)
    assert {name: part.residency for name, part in found.plan.components.items()} == {
        "a": "offload",
        "b": "resident",
        "c": "resident",
    }
    assert found.seconds == pytest.approx(8 + 4 + 8 + 0.5)
    assert found.peak_bytes == {"device": 61 * 10**9}
