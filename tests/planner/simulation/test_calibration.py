import numpy as np
import pytest

from rlinf.errors import ConfigError
from rlinf.planner.profile import Measurement
from rlinf.planner.search import Constraints
from rlinf.planner.simulation import (
    Conditions,
    GenerationModel,
    LengthDistribution,
    idle_shares,
    parse_lengths,
    simulate,
)
from rlinf.planner.simulation.answer_lengths import calibrated
from tests.planner.simulation.flows import chain, cluster, component, placed, profile

LENGTHS = LengthDistribution(mean=500, maximum=2000, sigma=0.8, correlation=0.5)


def true_seconds(model, groups, engines, group_size=4):
    rng = np.random.default_rng(100)
    draws = [model.groups(rng, groups, group_size, engines)[1].max() for _ in range(200)]
    return float(np.median(draws))


def test_the_parts_of_a_decoding_step_are_found_again_from_times_at_several_sizes():
    true = GenerationModel(
        lengths=LENGTHS, max_running=64, seconds_fixed=0.01, seconds_per_sequence=0.0005
    )
    measured = [
        Measurement(items=4 * n, devices=d, seconds=true_seconds(true, n, d), origin="true")
        for d in (1, 2, 4)
        for n in (4, 16, 64)
    ]
    found = calibrated(
        LENGTHS, 64, measured,
        seconds=true_seconds(true, 64, 2), groups=64, group_size=4, engines=2,
    )  # fmt: skip
    # Both from medians of a few random steps.
    assert found.seconds_fixed == pytest.approx(0.01, rel=0.25)
    assert found.seconds_per_sequence == pytest.approx(0.0005, rel=0.25)
    assert true_seconds(found, 64, 2) == pytest.approx(true_seconds(true, 64, 2), rel=0.05)


@pytest.mark.parametrize(
    ("power", "fixed"), [(0.0, True), (2.0, False)], ids=["latency", "steeper than throughput"]
)
def test_times_that_no_division_explains_leave_one_part_of_a_step(power, fixed):
    measured = [
        Measurement(items=4 * n, devices=1, seconds=n**power, origin="made up") for n in (4, 8, 16)
    ]
    found = calibrated(
        LENGTHS, 64, measured, seconds=3.0, groups=16, group_size=4, engines=1
    )  # fmt: skip
    assert (found.seconds_per_sequence == 0) == fixed
    assert (found.seconds_fixed == 0) == (not fixed)
    assert true_seconds(found, 16, 1) == pytest.approx(3.0, rel=0.1)


def test_one_measured_size_gives_its_time():
    one = [Measurement(items=64, devices=2, seconds=7.0, origin="made up")]
    found = calibrated(LENGTHS, 64, one, seconds=7.0, groups=16, group_size=4, engines=2)
    assert true_seconds(found, 16, 2) == pytest.approx(7.0, rel=0.05)


def test_idle_shares_by_the_components_of_devices():
    measured = profile(a=component(1.0), b=component(3.0), c=component(1.0))
    split = placed(a=(0, 1), b=(0, 1), c=(2,))
    four = cluster(4)
    found = simulate(chain("a", "b", "c"), split, measured, four, Constraints(items=8),
                     conditions=Conditions(steps=2))  # fmt: skip
    # 4 s, 12 s and 8 s in turn.
    groups = idle_shares(found, split, four)
    assert [(group.devices, group.components) for group in groups] == [
        ((0, 1), ("a", "b")), ((2,), ("c",)), ((3,), ()),
    ]  # fmt: skip
    assert [group.idle for group in groups] == pytest.approx([1 / 3, 2 / 3, 1])


def test_lengths_are_written_as_they_are_read():
    lengths = parse_lengths("lognormal:2000:0.7:8192:0.3")
    assert lengths == LengthDistribution(mean=2000, sigma=0.7, maximum=8192, correlation=0.3)
    assert parse_lengths(str(lengths)) == lengths
    assert parse_lengths("lognormal:2000:0.7:8192").correlation == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gauss:1:2:3", "write lognormal:2000:0.8:8192"),
        ("lognormal:1:2", "write lognormal:2000:0.8:8192"),
        ("lognormal:20:1:100.5", "write lognormal:2000:0.8:8192"),
        ("lognormal:inf:1:100", "mean: Input should be a finite number"),
        ("lognormal:20:400:100", "sigma: Input should be less than or equal to 5"),
        ("lognormal:20:1:100:2", "correlation: Input should be less than or equal to 1"),
        ("lognormal:100:1:90", "nearest: 150"),
    ],
)
def test_lengths_that_cannot_be_read(text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_lengths(text)
