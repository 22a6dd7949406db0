"""Evaluation specifications, intervals and comparisons, against published and exact values."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from rlinf.data.episode_evaluation import EpisodeOutcome, EvaluationResult, EvaluationSpec
from rlinf.data.estimates import mcnemar_exact, paired_difference_interval, wilson_interval
from rlinf.data.specifications import compare
from rlinf.errors import ConfigError


def a_spec(n=4, **changes):
    episodes = tuple((i, 1000 + i) for i in range(n))
    return EvaluationSpec(
        **{"task": {"type": "metaworld", "options": {"task": "reach-v3"}}, "episodes": episodes,
           "horizon": 150, "chunk": 2} | changes
    )  # fmt: skip


def played(spec, successes, checkpoint="run@10", **changes):
    outcomes = [
        EpisodeOutcome(i, seed, s, False, 10.0 * s, 150)
        for (i, seed), s in zip(spec.episodes, successes, strict=True)
    ]
    return EvaluationResult.of(spec, reversed(outcomes), checkpoint)


def test_hash_depends_on_every_part_and_not_on_key_order():
    spec = a_spec()
    same = a_spec(task={"options": {"task": "reach-v3"}, "type": "metaworld"})
    assert spec.sha256 == same.sha256
    others = [
        a_spec(5),
        a_spec(task={"type": "metaworld"}),
        a_spec(horizon=151),
        a_spec(chunk=1),
        a_spec(success="success_at_end"),
        a_spec(episodes=((0, 1000), (1, 1001), (2, 1002), (3, 7))),
    ]
    assert len({spec.sha256, *(other.sha256 for other in others)}) == 7


def test_the_hash_is_stable_over_versions_of_this_program():
    assert a_spec().sha256 == "e489ce6aeea2ce22f44f7664bae8d2f0ec0bb273c2f207fd0d091a1e17c52906"


def test_spec_file_round_trip_and_tampering(tmp_path):
    spec, path = a_spec(), tmp_path / "specs" / "reach.json"
    spec.save(path)
    assert EvaluationSpec.load(path) == spec
    content = json.loads(path.read_text())
    content["episodes"][0][1] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        EvaluationSpec.load(path)
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert EvaluationSpec.load(path).episodes[0] == (0, 5)
    for changed, told in (({"horizon": float("nan")}, "horizon .* holds nan, no whole number"),
                          ({"chunk": 1.5}, "chunk .* holds 1.5, no whole number"),
                          ({"episodes": [[0, float("nan")]]}, "episodes .* holds nan"),
                          ({"task": {"id": float("nan")}}, "is no specification: Out of range"),
                          ({"episodes": 3}, "is no specification")):  # fmt: skip
        path.write_text(json.dumps({**content, **changed}))
        with pytest.raises(ConfigError, match=told):
            EvaluationSpec.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": ()}, "at least one"),
        ({"episodes": ((1, 2), (1, 3))}, "once"),
        ({"episodes": ((1, -2),)}, "holds -2; ids and seeds lie between 0 and 2147483647"),
        ({"episodes": ((2**70, 2),)}, "ids and seeds lie between"),
        ({"horizon": 0}, "horizon"),
        ({"chunk": 0}, "chunk"),
        ({"success": "sometimes"}, "success_at_end"),
    ],
)
def test_illegal_specs(changes, message):
    with pytest.raises(ConfigError, match=message):
        a_spec(**changes)


def test_result_counts_and_survives_its_file(tmp_path):
    spec = a_spec()
    result = played(spec, [True, False, True, True])
    assert (result.n, result.successes, result.success_rate) == (4, 3, 0.75)
    assert result.interval == wilson_interval(3, 4)
    assert result.mean_return == 7.5
    assert [outcome.episode_id for outcome in result.outcomes] == [0, 1, 2, 3]
    result.save(tmp_path / "result.json")
    assert EvaluationResult.load(tmp_path / "result.json") == result
    summary = json.loads((tmp_path / "result.json").read_text())["summary"]
    assert summary["successes"] == 3
    assert str(result).startswith("success rate 0.750 (95 % interval 0.301 to 0.954, n = 4")


def test_success_follows_the_definition_and_a_fault_is_no_success():
    spec = a_spec(2, success="success_at_end")
    outcomes = [
        EpisodeOutcome(0, 1000, True, False, 1.0, 9),
        EpisodeOutcome(1, 1001, True, True, 5.0, 9, valid=False),
    ]
    result = EvaluationResult.of(spec, outcomes, "x")
    assert (result.successes, result.n_invalid, result.mean_return) == (0, 1, 1.0)
    told = "the simulator did not finish 1 of 2 episodes, which count as no success"
    assert told in str(result)
    assert "did not finish" not in str(played(spec, [True, False]))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o: o[:-1],
        lambda o: [*o[:-1], EpisodeOutcome(99, 1003, True, True, 0.0, 1)],
        lambda o: [*o[:-1], EpisodeOutcome(3, 1, True, True, 0.0, 1)],
        lambda o: [*o, o[0]],
    ],
)
def test_a_result_covers_exactly_the_episodes_of_its_spec(wrong):
    spec = a_spec()
    outcomes = list(played(spec, [True] * 4).outcomes)
    with pytest.raises(ValueError, match="episode"):
        EvaluationResult.of(spec, wrong(outcomes), "x")


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        EvaluationSpec.load(tmp_path / "nothing.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        EvaluationSpec.load(tmp_path / "a.json")
    a_spec().save(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="evaluation-result"):
        EvaluationResult.load(tmp_path / "b.json")


# Newcombe (1998), Statistics in Medicine 17, 857-872, table I, method 3.
@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_wilson_interval_has_the_published_values(k, n, low, high):
    assert wilson_interval(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_equals_scipy():
    for n, confidence in itertools.product((1, 2, 7, 100, 5000), (0.5, 0.9, 0.95, 0.999)):
        for k in {0, 1, n // 3, n - 1, n}:
            expected = stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
            assert wilson_interval(k, n, confidence) == pytest.approx(tuple(expected), abs=1e-12)
    for k, n in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="no proportion"):
            wilson_interval(k, n)


def test_mcnemar_equals_the_binomial_test():
    for b, c in itertools.product(range(8), repeat=2):
        expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
        assert mcnemar_exact(b, c) == pytest.approx(expected)
    assert mcnemar_exact(900, 1100) == pytest.approx(stats.binomtest(900, 2000).pvalue)


def test_paired_interval_has_the_published_value():
    # Newcombe (1998), Statistics in Medicine 17, 2635-2650, method 10.
    assert paired_difference_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_paired_interval_mirrors_and_contains_the_difference():
    for a, b, c, d in itertools.product((0, 1, 5, 30), repeat=4):
        if a + b + c + d == 0:
            continue
        low, high = paired_difference_interval(a, b, c, d)
        mirrored_low, mirrored_high = paired_difference_interval(a, c, b, d)
        assert (low, high) == pytest.approx((-mirrored_high, -mirrored_low))
        assert -1 <= low <= (b - c) / (a + b + c + d) <= high <= 1


def test_paired_interval_covers_the_truth_about_as_often_as_it_says():
    cells, n = np.array([0.5, 0.2, 0.1, 0.2]), 60
    draws = np.random.default_rng(0).multinomial(n, cells, size=2000)
    covered = [
        low <= 0.1 <= high
        for low, high in (paired_difference_interval(*map(int, d)) for d in draws)
    ]
    assert 0.935 <= np.mean(covered) <= 0.985


def test_paired_comparison():
    spec = a_spec(10)
    first = played(spec, [True] * 4 + [False] * 6, "run@10")
    second = played(spec, [False] + [True] * 8 + [False], "run@20")
    comparison = compare(first, second)
    assert (comparison.better, comparison.worse, comparison.n) == (5, 1, 10)
    assert comparison.difference == pytest.approx(0.4)
    assert comparison.p_value == pytest.approx(stats.binomtest(1, 6).pvalue)
    assert comparison.interval == paired_difference_interval(3, 5, 1, 1)
    low, high = comparison.interval
    assert low < 0.4 < high
    assert "run@20 against run@10: +0.400 success rate" in str(comparison)
    assert "5 of 10 episodes better, 1 worse" in str(comparison)


def test_where_nothing_ever_succeeds_returns_are_said_and_compared():
    spec = a_spec(8)
    nothing = played(spec, [False] * 8)

    def returning(least: float) -> EvaluationResult:
        pairs = enumerate(nothing.outcomes)
        outcomes = tuple(replace(each, episode_return=least + n) for n, each in pairs)
        return replace(nothing, outcomes=outcomes)

    first, second = returning(-10.0), returning(-7.5)
    assert str(first).endswith("\n  mean return -6.5 ± 2.29")
    comparison = compare(first, second)
    assert (comparison.metric, comparison.difference) == ("mean return", 2.5)
    assert (comparison.better, comparison.worse, comparison.method) == (8, 0, "bootstrap")
    succeeds = played(spec, [True] + [False] * 7)
    broken = replace(first, outcomes=tuple(replace(o, valid=False) for o in first.outcomes))
    ranked = [broken, returning(-2e6), returning(-2e6 + 1), first, second, returning(1e9), succeeds]
    assert [each.score for each in ranked] == sorted({each.score for each in ranked})
    assert (broken.score, succeeds.score) == (-1.0, 0.125)
    assert "mean return" not in str(succeeds)
    assert compare(first, succeeds).metric == "success rate"


def test_results_of_different_specs_are_not_compared():
    first, second = played(a_spec(2), [True, True]), played(a_spec(3), [True] * 3)
    with pytest.raises(ConfigError, match="only results on the same episodes"):
        compare(first, second)


def test_results_by_the_mode_and_by_drawn_actions_are_not_compared():
    by_mode = played(a_spec(2), [True, True])
    drawn = replace(by_mode, deterministic=False)
    with pytest.raises(ConfigError, match=r"by the mode, .* by drawn actions; nearest: both in"):
        compare(by_mode, drawn)
    assert compare(drawn, drawn).metric == "success rate"


def test_a_suite_has_a_rate_for_every_task_and_names_what_was_not_played():
    spec = a_spec(6)
    successes, tasks = [True, False, True, True, False, False], [0, 1, 0, 1, 1, 0]

    def result(names: tuple[str, ...]) -> EvaluationResult:
        outcomes = [
            EpisodeOutcome(i, seed, won, False, 0.0, 150, task=task)
            for (i, seed), won, task in zip(spec.episodes, successes, tasks, strict=True)
        ]
        return EvaluationResult.of(spec, outcomes, "run@10", names)

    whole = result(("reach", "push"))
    assert whole.by_task == {"reach": (2, 3), "push": (1, 3)}
    assert whole.mean_over_tasks == pytest.approx(0.5)
    assert "0.667 (0.208 to 0.939, n = 3)  reach" in str(whole)
    assert "0.500  mean over 2 tasks" in str(whole)
    assert whole.summary()["missing_tasks"] == []

    partial = result(("reach", "push", "open a door"))
    assert np.isnan(partial.mean_over_tasks)
    assert partial.summary()["missing_tasks"] == ["open a door"]
    assert "not played  open a door" in str(partial)
    assert "no mean over tasks: 1 of 3 were not played" in str(partial)


def test_a_result_with_tasks_survives_its_file(tmp_path):
    spec = a_spec(2)
    outcomes = [EpisodeOutcome(i, seed, True, False, 0.0, 9, task=i) for i, seed in spec.episodes]
    result = EvaluationResult.of(spec, outcomes, "run@10", ("reach", "push"))
    result.save(tmp_path / "result.json")
    assert EvaluationResult.load(tmp_path / "result.json") == result


def test_chains_of_tasks_are_told_by_the_length_that_they_reached(tmp_path):
    spec = a_spec(5)
    returns = [0.0, 1.0, 1.0, 3.0, 2.0]
    outcomes = [
        EpisodeOutcome(i, seed, earned == 3.0, False, earned, 9, valid=i < 4, task=i)
        for (i, seed), earned in zip(spec.episodes, returns, strict=True)
    ]
    texts = tuple(f"task {number}" for number in range(9))
    result = EvaluationResult.of(spec, outcomes, "run@10", texts, chain_length=3)
    assert result.reached == {1: 3, 2: 1, 3: 1}  # the last one counts as none
    assert result.mean_length == pytest.approx(1.0)
    assert str(result).splitlines()[1:5] == [
        "  0.600 (0.231 to 0.882)  reached 1 of 3",
        "  0.200 (0.036 to 0.624)  reached 2 of 3",
        "  0.200 (0.036 to 0.624)  reached 3 of 3",
        "  1.000  mean length of 3",
    ]
    assert "not played" not in str(result)  # an episode is of no single task
    assert result.summary()["mean_length"] == pytest.approx(1.0)
    result.save(tmp_path / "result.json")
    assert EvaluationResult.load(tmp_path / "result.json") == result


def test_chains_beside_other_tasks_are_told_by_their_length_and_the_others_by_task(tmp_path):
    spec = a_spec(6)
    played = [(0, 0.0), (1, 2.0), (2, 3.0), (3, 1.0), (3, 0.0), (1, 1.0)]  # task, return
    outcomes = [
        EpisodeOutcome(i, seed, earned == 3.0 or (task, earned) == (3, 1.0), False, earned, 9,
                       valid=i < 5, task=task)
        for (i, seed), (task, earned) in zip(spec.episodes, played, strict=True)
    ]  # fmt: skip
    texts = ("push", "pull", "lift", "reach", "open")
    chains = (3, 3, 3, 0, 0)
    result = EvaluationResult.of(spec, outcomes, "run@10", texts, task_chains=chains)
    assert result.by_task == {"reach": (1, 2), "open": (0, 0)}
    assert result.summary()["missing_tasks"] == ["open"]
    assert result.reached_shares == {1: 0.5, 2: 0.5, 3: 0.25}
    assert str(result).splitlines()[1:8] == [
        "  0.500 (0.095 to 0.905, n = 2)  reach",
        "  not played  open",
        "  no mean over tasks: 1 of 2 were not played",
        "  0.500 (0.150 to 0.850, n = 4)  reached 1 of 3",
        "  0.500 (0.150 to 0.850, n = 4)  reached 2 of 3",
        "  0.250 (0.046 to 0.699, n = 4)  reached 3 of 3",
        "  1.250  mean length of 3",
    ]
    result.save(tmp_path / "result.json")
    assert EvaluationResult.load(tmp_path / "result.json") == result


def test_a_task_that_the_simulator_never_finished_is_missing_and_not_a_rate_of_zero():
    spec = a_spec(4)
    outcomes = [
        EpisodeOutcome(i, seed, False, False, 0.0, 0, valid=bool(i % 2), task=i % 2)
        for i, seed in spec.episodes
    ]
    result = EvaluationResult.of(spec, outcomes, "run@10", ("reach", "push"))
    assert result.by_task == {"reach": (0, 0), "push": (0, 2)}
    assert result.summary()["missing_tasks"] == ["reach"]
    assert "missing  reach: the simulator finished none of 2 episodes" in str(result)
    assert "no mean over tasks: 1 of 2" in str(result)
    assert result.n == 4
