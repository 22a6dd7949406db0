import functools
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from benchmarks.scenarios import Scenario, find_scenario, run_scenario, scenarios, table
from rlinf.errors import ConfigError
from rlinf.planner.simulation import LengthDistribution

KINDS = {"published", "derived", "assumed"}


def outcomes(name, cluster, items=None, **values):
    found = run_scenario(name, clusters=(cluster,), steps=5, **values)
    return {o.mode: o for o in found if items in (None, o.items)}


def test_the_published_node_takes_about_the_published_time():
    found = outcomes("math-1.5b", "1x8:H100")
    assert found["collocated"].best
    # The step was fitted to 346.33 s by its parts, so this holds the fit, not a prediction.
    assert found["collocated"].simulation.seconds == pytest.approx(346.33, rel=0.05)
    assert found["collocated"].planned.seconds == pytest.approx(346.33, rel=0.05)


def test_with_as_many_engines_as_groups_separate_devices_win():
    found = outcomes("math-1.5b", "128x8:H100")
    assert found["disaggregated"].best
    times = {mode: outcome.simulation.seconds for mode, outcome in found.items()}
    assert min(times, key=times.get) == "disaggregated"


def test_environments_and_policy_on_separate_devices_win_where_they_pipeline():
    found = outcomes("embodied", "1x8:H100")
    assert found["hybrid"].best
    plans = found["hybrid"].planned.plan.components
    assert plans["env"].pipeline_stages == 2
    assert set(plans["actor"].devices) == set(plans["env"].devices) | set(plans["rollout"].devices)
    times = {mode: outcome.simulation.seconds for mode, outcome in found.items()}
    assert min(times, key=times.get) == "hybrid"


def test_with_stale_weights_generation_and_training_overlap():
    best = {
        staleness: next(
            o for o in outcomes("math-1.5b", "128x8:H100", staleness=staleness).values() if o.best
        )
        for staleness in (0, 1)
    }
    assert "rollout &" in best[1].planned.shape
    assert best[1].simulation.seconds < 0.95 * best[0].simulation.seconds
    assert best[1].planned.seconds == pytest.approx(best[1].simulation.seconds, rel=0.1)


def written():
    """What the scenario file says, as plain data."""
    return deepcopy(_read())


@functools.cache
def _read():
    text = Path("benchmarks/scenarios.yaml").read_text("utf-8")
    return yaml.safe_load(text)


def figures(section, before=""):
    """Keys of everything in a section but words: with dots where it is in a section inside."""
    for key, value in section.items():
        if key in ("about", "flow", "origins", "components"):
            continue
        if isinstance(value, dict):
            yield from figures(value, f"{before}{key}.")
        else:
            yield before + key


def test_every_figure_has_an_origin():
    for scenario in written().values():
        for section in (scenario, *scenario["components"].values()):
            keys = [key for origin in section["origins"] for key in origin["of"]]
            assert sorted(keys) == sorted(figures(section))
            assert {origin["kind"] for origin in section["origins"]} <= KINDS
            assert all(o["kind"] == "assumed" or o["why"] for o in section["origins"])
    for scenario in scenarios().values():
        for component in scenario.profile().components.values():
            assert all(measurement.origin for measurement in component.measurements)
            assert component.scaling.origin


@pytest.mark.parametrize("name", sorted(scenarios()))
def test_a_figure_without_an_origin_is_refused(name):
    for figure in ("group_size", "synchronisation_seconds", "clusters"):
        scenario = written()[name]
        _without(scenario, figure)
        with pytest.raises(ValidationError, match=f"`{figure}` has no origin"):
            Scenario.model_validate(scenario)
    for figure in ("seconds", "resident_gb", "peak_gb", "onload_seconds"):
        scenario = written()[name]
        _without(scenario["components"]["actor"], figure)
        with pytest.raises(ValidationError, match=f"`{figure}` has no origin"):
            Scenario.model_validate(scenario)


def _without(section, figure):
    for origin in section["origins"]:
        origin["of"] = [key for key in origin["of"] if key != figure]
    section["origins"] = [origin for origin in section["origins"] if origin["of"]]


def test_an_origin_of_nothing_two_of_one_figure_and_one_without_a_reason_are_refused():
    scenario = written()["embodied"]
    assumed = {"kind": "assumed"}
    for extra, why in (
        ({"of": ["speed"], **assumed}, "`speed` is no figure"),
        ({"of": ["group_size"], **assumed}, "`group_size` has 2 origins"),
        ({"of": ["speed"], "kind": "published"}, "what is published needs a sentence"),
    ):
        changed = {**scenario, "origins": [*scenario["origins"], extra]}
        with pytest.raises(ValidationError, match=why):
            Scenario.model_validate(changed)


def test_the_published_parts_of_the_7b_are_found_again():
    found = outcomes("math-7b", "8x8:H100", items=2048)
    assert found["collocated"].best
    # The step less what is neither generation nor training; it was fitted by its parts.
    assert found["collocated"].simulation.seconds == pytest.approx(325.09 + 73.01, rel=0.05)
    assert found["collocated"].planned.seconds == pytest.approx(325.09 + 73.01, rel=0.05)


@pytest.mark.parametrize("name", ["math-32b", "qwen3-30b-a3b", "behavior"])
def test_scenarios_have_a_plan_at_every_size(name):
    sizes = [(size.cluster, size.items) for size in find_scenario(name).clusters]
    best = [o for o in run_scenario(name, steps=1) if o.best]
    assert [(str(o.cluster), o.items) for o in best] == sizes
    for outcome in best:
        assert outcome.simulation.seconds == pytest.approx(outcome.planned.seconds, rel=0.35)


def test_the_published_gain_of_pipelining_is_what_the_parts_of_behavior_give():
    parts = find_scenario("behavior").components
    env, rollout = parts["env"].seconds, parts["rollout"].seconds
    assert rollout / 32000 == pytest.approx(0.0412)
    assert (env + rollout) / max(env, rollout) == pytest.approx(1.6, rel=0.05)


def test_the_table_marks_the_choice_of_the_planner():
    rows = table(run_scenario("embodied", clusters=("1x8:H100",), steps=1))
    assert [row[2] for row in rows if row[2].endswith("*")] == ["hybrid *"]
    assert {row[1] for row in rows[1:]} == {"128"}


def test_an_unknown_scenario_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean `math-1\.5b`"):
        find_scenario("math-1.5")


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.5])
def test_lengths_have_the_mean_that_was_asked_for(sigma):
    lengths = LengthDistribution(mean=13975, maximum=27648, sigma=sigma, correlation=0.5)
    drawn = lengths.draw(np.random.default_rng(0), 4000, 8)
    assert drawn.mean() == pytest.approx(13975, rel=0.03)
    assert 1 <= drawn.min() <= drawn.max() <= 27648


def test_responses_to_one_prompt_are_alike_by_the_correlation():
    lengths = LengthDistribution(mean=100, maximum=100000, sigma=0.5, correlation=0.7)
    logs = np.log(lengths.draw(np.random.default_rng(0), 20000, 2))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.7, abs=0.03)


def test_a_mean_at_the_limit_is_refused():
    with pytest.raises(ValueError, match="needs a limit well above it; nearest: 150"):
        LengthDistribution(mean=100, maximum=90, sigma=0.5)
