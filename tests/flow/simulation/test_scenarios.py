import numpy as np
import pytest

from rlinf.errors import ConfigError
from rlinf.flow.simulation import LengthDistribution
from rlinf.flow.simulation.scenario_data import find_scenario, scenarios
from rlinf.flow.simulation.scenarios import run_scenario, table


def outcomes(name, cluster, **values):
    return {o.mode: o for o in run_scenario(name, clusters=(cluster,), steps=5, **values)}


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


def test_every_figure_has_an_origin():
    for scenario in scenarios().values():
        for component in scenario.profile().components.values():
            assert all(measurement.origin for measurement in component.measurements)


def test_the_table_marks_the_choice_of_the_planner():
    rows = table(run_scenario("embodied", clusters=("1x8:H100",), steps=1))
    assert [row[1] for row in rows if row[1].endswith("*")] == ["hybrid *"]


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
