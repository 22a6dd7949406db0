import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Stage
from rlinf.planner.costs import CostModel
from rlinf.planner.profile import ComponentProfile, Measurement, ScalingLaw
from rlinf.planner.search import ComponentConstraint, Constraints, plan
from tests.planner.simulation.flows import cluster, profile


def measured(points, **values):
    """A profile from (items, devices, seconds) or (items, devices, seconds, bytes)."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(items=n, devices=d, seconds=s, peak_bytes=sum(rest), origin="test")
            for n, d, s, *rest in points
        ),
        **values,
    )


sizes = st.integers(1, 4096)
grids = st.tuples(
    st.lists(sizes, min_size=1, max_size=5, unique=True),
    st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
    st.floats(0.001, 100),
    st.floats(0.0001, 1),
)


def grid_points(grid):
    """More items take longer, more devices are faster; with a fixed part."""
    items, devices, fixed, each = grid
    return [(n, d, fixed + each * n / d, 100 + n // d) for n in items for d in devices]


@settings(max_examples=60)
@given(grids)
def test_measurements_are_reproduced_exactly(grid):
    points = grid_points(grid)
    model = CostModel("x", measured(points))
    for n, d, seconds, memory in points:
        assert (model.seconds(n, d), model.peak_bytes(n, d)) == (seconds, memory)
        assert model.extensions(n, d) == ()


@settings(max_examples=60)
@given(grids, st.integers(1, 8192), st.integers(1, 8192))
def test_more_items_never_take_less_and_more_devices_never_longer(grid, n, m):
    model = CostModel("x", measured(grid_points(grid)))
    low, high = sorted((n, m))
    devices = sorted(grid[1])
    counts = np.arange(devices[0], devices[-1] + 1)
    assert (model.seconds(low, counts) <= model.seconds(high, counts) * (1 + 1e-12)).all()
    assert (model.peak_bytes(low, counts) <= model.peak_bytes(high, counts) * (1 + 1e-12)).all()
    seconds = model.seconds(n, counts)
    assert (np.diff(seconds) <= 1e-9 * seconds[1:]).all()


@settings(max_examples=60)
@given(grids, st.integers(1, 5000), st.integers(1, 64))
def test_a_value_between_measurements_lies_between_theirs(grid, n, d):
    items, devices, _, _ = grid
    model = CostModel("x", measured(grid_points(grid)))
    n = min(max(n, min(items)), max(items))
    d = min(max(d, min(devices)), max(devices))
    below, above = max(i for i in items if i <= n), min(i for i in items if i >= n)
    few, many = max(i for i in devices if i <= d), min(i for i in devices if i >= d)
    fastest, slowest = model.seconds(below, many), model.seconds(above, few)
    assert fastest * (1 - 1e-9) <= model.seconds(n, d) <= slowest * (1 + 1e-9)


def test_a_power_law_and_a_fixed_cost_are_both_exact_between_measurements():
    power = CostModel("x", measured([(10, 1, 1.0), (1000, 1, 100.0)]))
    assert power.seconds(100, 1) == pytest.approx(10.0)
    fixed = CostModel("x", measured([(10, 1, 2.0), (1000, 1, 2.0)]))
    assert fixed.seconds(100, 1) == pytest.approx(2.0)
    shared = CostModel("x", measured([(8, 1, 8.0), (8, 4, 2.0)]))
    assert shared.seconds(8, 2) == pytest.approx(4.0)


def test_beyond_the_measured_items_the_answer_is_too_much_and_says_so():
    model = CostModel("x", measured([(10, 1, 2.0, 100), (20, 1, 3.0, 150)]))
    assert (model.seconds(5, 1), model.peak_bytes(5, 1)) == (2.0, 100)
    assert (model.seconds(40, 1), model.peak_bytes(40, 1)) == (6.0, 250)
    assert model.extensions(5, 1) == ("5 items from 10–20 on 1 device",)
    assert model.extensions(40, 1) == ("40 items from 10–20 on 1 device",)
    steeper = CostModel("x", measured([(10, 1, 1.0), (20, 1, 4.0)]))
    assert steeper.seconds(40, 1) == pytest.approx(16.0)
    single = CostModel("x", measured([(10, 1, 1.0, 100)]))
    assert single.peak_bytes(30, 1) == 300


def test_devices_beyond_the_measured_ones_need_a_law():
    points = [(64, 8, 4.0, 10), (128, 8, 7.0, 20)]
    bare = CostModel("x", measured(points))
    assert np.isinf(bare.seconds(64, 16))
    with pytest.raises(ConfigError, match=r"'x' on 16 devices .* no scaling law .* nearest: 8"):
        bare.check_devices(16)
    law = ScalingLaw(lowest=4, highest=32, factor_per_doubling=1.1, origin="assumed")
    model = CostModel("x", measured(points, scaling=law))
    model.check_devices(16)
    assert model.seconds(128, 16) == pytest.approx(4.0 * 1.1)  # 64 items for 8 of the devices
    assert model.peak_bytes(128, 16) == 10
    assert model.extensions(128, 16) == ("16 devices by scaling law from 8",)
    assert model.seconds(64, 4) == pytest.approx(7.0 * 1.1)
    assert np.isinf(model.seconds(64, 64))
    with pytest.raises(ConfigError, match="nearest: 32"):
        model.check_devices(64)


def test_sub_batches_that_were_not_measured_cost_what_their_items_cost_alone():
    several = ComponentProfile(
        measurements=(
            Measurement(items=32, devices=1, seconds=2.0, origin="test"),
            Measurement(items=64, devices=1, seconds=3.0, origin="test"),
            Measurement(items=64, devices=1, pipeline_stages=4, seconds=5.5, origin="test"),
        )
    )
    model = CostModel("x", several)
    assert model.seconds(64, 1, 2) == pytest.approx(2 * 2.0)
    assert model.seconds(64, 1, 4) == 5.5
    assert model.extensions(64, 1, 2) == ("2 pipeline stages from 1",)


def test_one_sub_batch_is_not_told_from_two():
    two = Measurement(items=64, devices=1, pipeline_stages=2, seconds=5.5, peak_bytes=7, origin="")
    model = CostModel("x", ComponentProfile(measurements=(two,)))
    assert model.seconds(64, 1, 2) == 5.5
    for stages in (1, 4):
        assert np.isinf(model.seconds([32, 64], 1, stages)).all()
        assert np.isinf(model.peak_bytes(64, 1, stages))
        with pytest.raises(ConfigError, match=f"with {stages} pipeline stages; measured with 2"):
            model.check_devices(1, stages)


def at(devices, processes, seconds, items=8, stages=1):
    return Measurement(
        items=items,
        devices=devices,
        processes=processes,
        pipeline_stages=stages,
        seconds=seconds,
        origin="test",
    )


def model_of(*measurements, **others):
    return CostModel("x", ComponentProfile(measurements=measurements), **others)


def test_figures_of_as_many_processes_as_a_plan_has_count():
    four, one, two = at(1, 4, 0.25), at(1, 1, 1.0), at(2, 2, 0.5)
    both = model_of(four, one, two)
    assert (both.seconds(8, 1), both.seconds(8, 2)) == (1.0, 0.5)
    assert both.extensions(8, 1) == ()
    # Those of other sizes do not count either.
    assert model_of(at(1, 4, 0.1, items=4), one).seconds(4, 1) == 1.0
    # Where there are no others they count, and it is said.
    alone = model_of(four, at(1, 8, 0.125))
    assert alone.seconds(8, 1) == 0.25
    assert alone.extensions(8, 1) == ("1 process from 4",)
    engines = model_of(at(4, 4, 1.0), at(4, 2, 2.0), devices_per_process=2)
    assert engines.seconds(8, 4) == 2.0
    unsaid = model_of(at(4, None, 1.0), devices_per_process=4)
    assert unsaid.extensions(8, 4) == ()


def test_figures_of_other_processes_count_on_the_devices_that_have_none_of_a_plans():
    several = model_of(at(1, 1, 1.0), at(2, 4, 0.6), at(4, 8, 0.4))
    assert [several.seconds(8, devices) for devices in (1, 2, 4)] == [1.0, 0.6, 0.4]
    assert several.bounds() == (1, 4)
    assert several.extensions(8, 1) == ()
    assert several.extensions(8, 2) == ("2 processes from 4",)
    assert several.extensions(8, 3) == ("3 processes from 4, 8",)
    first = model_of(at(1, 2, 4.0), at(4, 4, 1.0))
    assert (first.seconds(8, 1), first.seconds(8, 4)) == (4.0, 1.0)
    assert first.extensions(8, 1) == ("1 process from 2",)
    assert first.extensions(8, 4) == ()


def test_pipeline_stages_are_told_from_one_rather_than_from_other_processes():
    told = model_of(at(1, 1, 1.0), at(1, 4, 0.1, stages=2))
    assert (told.seconds(8, 1, 2), told.extensions(8, 1, 2)) == (
        2.0,
        ("2 pipeline stages from 1", "4 items from 8 on 1 device"),
    )
    alone = model_of(at(1, 4, 0.1), at(1, 1, 1.0, stages=2))
    assert (alone.seconds(8, 1, 1), alone.seconds(8, 1, 2)) == (0.1, 1.0)


@pytest.mark.parametrize("turned", [1, -1])
def test_of_one_size_the_figure_that_says_its_processes_counts(turned):
    found = model_of(*(at(2, None, 4.0), at(2, 1, 3.0))[::turned], devices_per_process=2)
    assert (found.seconds(8, 2), found.extensions(8, 2)) == (3.0, ())


def test_a_plan_needs_the_pipeline_stages_that_were_measured():
    two = Measurement(items=8, devices=1, pipeline_stages=2, seconds=2.0, peak_bytes=7, origin="")
    once = two.model_copy(update={"pipeline_stages": 1})
    measured = {"a": two, "b": once, "c": once}
    parts = {name: ComponentProfile(measurements=(one,)) for name, one in measured.items()}
    flow = Flow("loop")
    a = Stage("a", "run", inputs=("back",), outputs=("there", "out"))
    flow.loop("loop", a, Stage("b", "run", inputs=("there",), outputs=("back",)))
    flow.stage("c", Stage("c", "run", inputs=("out",)))
    for stages in ((1, 2), (1,)):
        each = ComponentConstraint(pipeline_stages=stages)
        asked = Constraints(items=8, components={"a": each, "b": each})
        if 2 in stages:
            found = plan(flow, profile(**parts), cluster(1, memory_bytes=100), asked)
            assert found.plan.components["a"].pipeline_stages == 2
        else:
            with pytest.raises(ConfigError, match="'a' was not measured with 1 pipeline stages"):
                plan(flow, profile(**parts), cluster(1, memory_bytes=100), asked)


def test_kinds_of_devices_have_their_own_costs():
    points = [
        Measurement(items=8, devices=1, seconds=s, device_kind=kind, origin="test")
        for kind, s in (("H100", 1.0), ("A100", 2.0))
    ]
    of_both = ComponentProfile(measurements=tuple(points))
    assert CostModel("x", of_both, "A100").seconds(8, 1) == 2.0
    with pytest.raises(ConfigError, match="'x' was not measured on H20; measured on A100, H100"):
        CostModel("x", of_both, "H20")


def test_figures_without_a_kind_count_where_none_names_the_kind_and_say_so():
    def at(kind, seconds):
        return Measurement(items=8, devices=1, seconds=seconds, device_kind=kind, origin="test")

    unsaid = CostModel("x", ComponentProfile(measurements=(at("", 3.0),)), "H100")
    assert (unsaid.seconds(8, 1), unsaid.assumed) == (3.0, True)
    both = ComponentProfile(measurements=(at("", 3.0), at("H100", 1.0)))
    named = CostModel("x", both, "H100")
    assert (named.seconds(8, 1), named.assumed) == (1.0, False)
    with pytest.raises(ConfigError, match="'x' was measured on devices without a named kind, H100"):
        CostModel("x", both)


def test_two_measurements_of_one_size_are_refused():
    with pytest.raises(ConfigError, match="two measurements of one size on 1 devices"):
        CostModel("x", measured([(8, 1, 1.0), (8, 1, 2.0)]))
