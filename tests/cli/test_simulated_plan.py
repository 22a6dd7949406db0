"""``rlinf plan`` plays the plan that it found, and says that what it prints is simulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.monitor.report.trace import trace_of
from rlinf.monitor.timeline import read_events
from rlinf.planner import kept_profiles
from rlinf.planner.cluster_shape import parse_cluster_shape
from rlinf.planner.planned import find_plan
from rlinf.planner.profile import ComponentProfile, Measurement, Profile, ScalingLaw
from rlinf.planner.simulation import Conditions, simulate
from rlinf.planner.simulation.simulate import SIMULATED_STEPS, simulate_planned
from rlinf.runners.embodied import Embodied
from rlinf.runners.reasoning import Reasoning

from ..runners import reasoning_support, support

CLUSTER = "4x2:H100"


def measured(seconds: float, items: int) -> ComponentProfile:
    """A component that scales to any number of devices."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(items=n, devices=2, seconds=seconds * n / items, origin="a test")
            for n in (items // 2, items)
        ),
        scaling=ScalingLaw(lowest=1, highest=10_000, origin="a test"),
    )


def embodied_profile(directory: Path) -> Profile:
    """Of the 8 environments of the small recipe."""
    return kept_profiles.fingerprints(support.small_config(directory)).profile(
        {"env": measured(2.0, 8), "rollout": measured(1.0, 8), "actor": measured(1.0, 8)}
    )


def reasoning_profile(directory: Path) -> Profile:
    """Of the 16 sequences of the small recipe."""
    return kept_profiles.fingerprints(reasoning_support.small_config(directory)).profile(
        {"rollout": measured(8.0, 16), "reward": measured(0.1, 16), "actor": measured(1.0, 16)}
    )


def simulated_step(printed: str) -> tuple[float, float, float]:
    """Median and range of the simulated steps, as printed."""
    number = r"([\d.e+]+)"
    pattern = rf"^SIMULATED step: median {number} s, 10–90 %: {number}–{number} s"
    found = re.search(pattern, printed, re.MULTILINE)
    assert found is not None, printed
    low, middle, high = float(found[2]), float(found[1]), float(found[3])
    return low, middle, high


def test_the_plan_is_played_on_a_cluster_of_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = embodied_profile(tmp_path)
    profile.save(tmp_path / "profile.json")
    config, shape = support.small_config(tmp_path), parse_cluster_shape(CLUSTER)
    words = ["plan", str(tmp_path / "small.yaml"), "--profile", str(tmp_path / "profile.json")]
    timeline = tmp_path / "timeline.json"
    assert main([*words, "--cluster", CLUSTER, "--steps", "3", "--timeline", str(timeline)]) == 0
    printed = capsys.readouterr().out

    flow = Embodied.flow(config)
    found = find_plan(config, flow, profile, cluster=shape)
    played = simulate(
        flow, found.plan, profile, shape, config.planning.constraints,
        conditions=Conditions(steps=3),
    )  # fmt: skip
    low, middle, high = simulated_step(printed)
    assert middle == pytest.approx(played.quantiles(0.5)[0], rel=1e-3)
    # Medians of measurements are played, no lengths are drawn: every step is the same.
    assert low == middle == high

    shares = re.findall(r"^SIMULATED idle: ([\d.]+) % of devices? (\S+)", printed, re.MULTILINE)
    sizes = [1 + int(last or first) - int(first) for _, d in shares for first, _, last in
             [each.partition("-") for each in d.split(",")]]  # fmt: skip
    assert sum(sizes) == shape.devices
    together = sum(float(share) * size for (share, _), size in zip(shares, sizes, strict=True))
    assert together / shape.devices == pytest.approx(100 * played.idle_fraction, abs=0.1)

    # The reader of a real run's timeline: no plan beside it is needed.
    trace = trace_of(read_events(timeline), [node.name for node in flow.nodes])
    assert list(trace.steps) == [1, 2, 3]
    parts = found.plan.components
    assert {s.component: s.devices for s in trace.spans if s.category == "stage"} == {
        name: part.devices for name, part in parts.items()
    }
    (begin, _), (_, end) = trace.steps[1], trace.steps[3]
    assert end - begin == pytest.approx(3 * middle, rel=1e-3)


def test_training_in_parts_is_played_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A trainer that could begin with a half takes all where it takes turns: it costs less.
    changes = ("actor.n_minibatches=2", "actor.shuffle=false")
    config = reasoning_support.small_config(tmp_path, *changes)
    assert config.planning.constraints.granularities == (8,)
    actor = ComponentProfile(
        measurements=tuple(
            Measurement(items=items, devices=1, seconds=seconds, origin="a test")
            for items, seconds in ((8, 1.5), (16, 2.0))
        )
    )
    others = {"rollout": measured(4.0, 16), "reward": measured(1e-6, 16)}
    profile = kept_profiles.fingerprints(config).profile({**others, "actor": actor})
    profile.save(tmp_path / "profile.json")
    words = ["plan", str(tmp_path / "small.yaml"), "--profile", str(tmp_path / "profile.json")]
    assert main([*words, *changes, "--cluster", "1x1", "--lengths", "lognormal:6:0:12"]) == 0
    printed = capsys.readouterr().out
    predicted = re.search(r"^predicted step: ([\d.e+]+) s", printed, re.MULTILINE)
    assert predicted is not None
    _, middle, _ = simulated_step(printed)
    assert middle == pytest.approx(float(predicted[1]), rel=1e-3)


def test_lengths_of_answers_spread_the_step_around_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = reasoning_profile(tmp_path)
    profile.save(tmp_path / "profile.json")
    config, shape = reasoning_support.small_config(tmp_path), parse_cluster_shape(CLUSTER)
    words = ["plan", str(tmp_path / "small.yaml"), "--profile", str(tmp_path / "profile.json")]
    timeline = tmp_path / "timeline.json"
    timeline.write_text('[\n{"ph": "M"},\n')  # an older one is replaced, and no recipe
    assert main([*words, "--cluster", CLUSTER, "--timeline", words[1]]) == 2
    assert "exists and is something else; give a new file" in capsys.readouterr().err
    assert main([*words, "--cluster", CLUSTER, "--timeline", str(timeline)]) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED with answers of lognormal:6:0.8:12:0.5 (limit of the recipe" in printed
    low, middle, high = simulated_step(printed)
    assert low < middle < high

    flow = Reasoning.flow(config)
    found = find_plan(config, flow, profile, cluster=shape)
    played = simulate_planned(config, flow, found, profile, shape)
    assert (low, middle, high) == pytest.approx(played.quantiles(0.1, 0.5, 0.9), rel=1e-3)
    assert middle == pytest.approx(found.seconds, rel=0.2)

    trace = trace_of(read_events(timeline), [node.name for node in flow.nodes])
    assert len(trace.steps) == SIMULATED_STEPS
    ranks = {s.track: s.devices for s in trace.spans if s.name == "rollout.generate"}
    rollout = found.plan.components["rollout"]
    assert len(ranks) == rollout.processes > 1
    assert sorted(device for devices in ranks.values() for device in devices) == list(
        rollout.devices
    )

    assert main([*words, "--cluster", CLUSTER, "--lengths", "lognormal:6:0:12"]) == 0
    low, middle, high = simulated_step(capsys.readouterr().out)
    assert low == middle == high == pytest.approx(found.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lengths", "long"], "--lengths: lengths 'long' are not lognormal:MEAN:SIGMA:MAX"),
        (["--lengths", "lognormal:6:x:12"], "write lognormal:2000:0.8:8192"),
        (["--lengths", "lognormal:6:-1:12"], "sigma: Input should be greater than or equal to 0"),
        (["--lengths", "lognormal:12:1:12"], "needs a limit well above it; nearest: 18"),
        (["--lengths", "lognormal:6:1:64"], "ends answers at 12; nearest: 12"),
        (["--timeline", "nowhere/t.json"], "there is no directory nowhere; make it first"),
        (["--timeline", "."], "is a directory; give a file, such as timeline.json"),
        (["--memory", "--lengths", "lognormal:6:1:12"], "give it alone"),
        (["--memory", "--steps", "3"], "give it alone"),
        (["--cluster", "4x2:H1000"], "did you mean H100?"),
        (["--steps", "0"], "--steps"),
        (["--steps", "1000000000000"], "--steps"),
    ],
)
def test_what_cannot_be_simulated_is_said_before_anything_is_planned(
    tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = reasoning_support.write_recipe(tmp_path)
    assert main(["plan", str(recipe), *words]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_lengths_of_a_recipe_without_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = support.write_recipe(tmp_path)
    assert main(["plan", str(recipe), "--lengths", "lognormal:6:1:12"]) == 2
    assert "the recipe generates no text" in capsys.readouterr().err
