"""pass@k, votes, intervals and comparisons, against enumeration, simulation and scipy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlinf.data.estimates import estimate, majority, pass_at_k, wilson_interval
from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.data.prompts.prompt_files import LoadingReport
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.data.specifications import compare
from rlinf.data.text_evaluation import (
    PromptOutcome,
    TextEvaluationResult,
    TextEvaluationSpec,
)
from rlinf.errors import ConfigError


def a_dataset(n=4, answer="1"):
    prompts = tuple(
        Prompt(prompt_id=i, text=f"{i}?", tokens=np.array([i]), answer=[answer]) for i in range(n)
    )
    return PromptDataset(prompts, LoadingReport(records=n, prompts=n))


def a_spec(n=4, samples=2, **changes):
    rest = {"sampling": {"temperature": 1.0}, "reward": {"type": "exact_match"}, "threshold": 1.0}
    return TextEvaluationSpec.of(a_dataset(n), samples=samples, **{**rest, **changes})


def outcome(prompt_id, correct, answers=None, **rest):
    n = len(correct)
    return PromptOutcome(
        prompt_id=prompt_id, correct=tuple(map(bool, correct)), answers=answers,
        lengths=(3,) * n, truncated=(False,) * n, valid=(True,) * n, **rest,
    )  # fmt: skip


def result(rows, answers=None, checkpoint="run@1", **changes):
    spec = a_spec(len(rows), len(rows[0]), **changes)
    given_answers = answers or [None] * len(rows)
    outcomes = [outcome(i, row, a) for i, (row, a) in enumerate(zip(rows, given_answers))]  # noqa: B905
    return TextEvaluationResult.of(spec, reversed(outcomes), checkpoint)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n),
                                                     st.integers(1, n))))  # fmt: skip
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over binomial counts is 1 − (1 − p)^k."""
    n, k, p = 12, 5, 0.23
    expected = sum(stats.binom.pmf(c, n, p) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-12)
    with pytest.raises(ValueError, match="pass@3 cannot"):
        pass_at_k(2, 1, 3)


def test_votes():
    assert majority([True, True, False], ["7", " 7 ", "8"]) == 1.0
    assert majority([True, False, False], ["7", "8", "8"]) == 0.0
    assert majority([True, False], ["7", "8"]) == 1.0  # of equals the first one counts
    assert majority([True, False, False], ["7", None, None]) == 1.0
    assert majority([False, False], [None, None]) == 0.0
    assert majority([False, False, True, True, False], ["a", "a", "b", "b", "c"]) == 0.0
    assert majority([True, False], ["7", "7"]) == 0.5  # a grader that is not consistent


def test_metrics_of_a_result_by_hand():
    rows = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    answers = [("1",) * 4, ("1", "2", "2", "3"), ("1", "1", "2", None), (None,) * 4]
    found = result(rows, answers)
    assert found.scores("pass@1").tolist() == [1, 0.25, 0.5, 0]
    assert found.scores("mean@4").tolist() == [1, 0.25, 0.5, 0]
    assert found.scores("pass@2").tolist() == pytest.approx([1, 0.5, 1 - 1 / 6, 0])
    assert found.scores("pass@4").tolist() == [1, 1, 1, 0]
    assert found.scores("maj@4").tolist() == [1, 0, 1, 0]
    assert found.metrics == ("pass@1", "pass@2", "pass@4", "mean@4", "maj@4")
    assert result(rows).metrics == ("pass@1", "pass@2", "pass@4", "mean@4")
    nobody = [(None,) * 4] * 4
    assert result(rows, nobody).metrics == ("pass@1", "pass@2", "pass@4", "mean@4")
    assert result([[1], [0]]).metrics == ("pass@1",)
    for metric, reason in {
        "pass@5": "nearest: pass@4",
        "mean@2": "nearest: mean@4",
        "maj@8": "nearest: maj@4",
        "best@4": "is no metric",
        "pass@0": "is no metric",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            found.estimate(metric)
    with pytest.raises(ConfigError, match="were not recorded"):
        result(rows).estimate("maj@4")


def test_one_sample_has_the_wilson_interval():
    found = result([[1]] * 7 + [[0]] * 3).estimate("pass@1")
    assert (found.value, found.method, found.prompts) == (0.7, "wilson", 10)
    assert (found.low, found.high) == wilson_interval(7, 10)


def test_fractions_have_the_bootstrap_interval():
    scores = np.random.default_rng(0).beta(2, 3, size=60)
    found = estimate(scores, name="mean@8")
    reference = stats.bootstrap((scores,), np.mean, method="percentile", n_resamples=20_000,
                                rng=np.random.default_rng(1)).confidence_interval  # fmt: skip
    assert found.method == "bootstrap"
    assert (found.low, found.high) == pytest.approx(tuple(reference), abs=0.004)
    assert found == estimate(scores, name="mean@8")


def test_the_bootstrap_interval_covers():
    generator = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        scores = generator.binomial(8, generator.beta(1, 2, size=40)) / 8
        found = estimate(scores, name="mean@8")
        covered += found.low <= 1 / 3 <= found.high
    assert covered >= 180


def test_equal_scores_do_not_pretend_to_certainty():
    for value in (0.0, 0.25, 1.0):
        found = estimate(np.full(20, value), name="pass@2")
        assert found.method == "wilson"
        assert found.low <= value <= found.high
        assert found.high - found.low > 0.1
    with pytest.raises(ValueError, match="no score"):
        estimate(np.array([]), name="pass@1")


def test_comparison_of_single_samples_is_that_of_episodes():
    first = result([[0]] * 12 + [[1]] * 8, checkpoint="a")
    second = result([[1]] * 10 + [[0]] * 3 + [[1]] * 7, checkpoint="b")
    found = compare(first, second)
    assert (found.better, found.worse, found.method) == (10, 1, "newcombe")
    assert found.difference == pytest.approx(9 / 20)
    assert found.p_value == pytest.approx(stats.binomtest(1, 11).pvalue)
    assert found.interval[0] < 9 / 20 < found.interval[1]
    assert str(found).startswith("b against a: +0.450 pass@1 (95 % interval ")


def test_comparison_of_repeated_samples():
    generator = np.random.default_rng(1)
    before = generator.random((30, 8)) < 0.4
    after = generator.random((30, 8)) < 0.7
    found = compare(result(before.tolist()), result(after.tolist()), "mean@8")
    change = after.mean(1) - before.mean(1)
    assert found.difference == pytest.approx(change.mean())
    assert found.method == "bootstrap"
    assert found.interval == pytest.approx(stats.t.interval(
        0.95, 29, change.mean(), stats.sem(change)), abs=0.02)  # fmt: skip
    assert found.p_value < 0.001
    same = compare(result(before.tolist()), result(before.tolist()), "mean@8")
    assert (same.difference, same.p_value, same.better, same.worse) == (0, 1, 0, 0)


def test_the_sign_flip_test_agrees_with_enumeration():
    before = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    after = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    found = compare(result(before), result(after), "mean@4")
    change = np.mean(after, 1) - np.mean(before, 1)
    sums = [abs(np.dot(signs, change)) for signs in itertools.product((-1, 1), repeat=6)]
    exact = np.mean([total >= abs(change.sum()) - 1e-9 for total in sums])
    assert found.p_value == pytest.approx(exact, abs=0.02)


def test_results_of_other_specifications_are_not_compared():
    rows = [[1, 0]] * 3
    with pytest.raises(ConfigError, match="only results on the same prompts"):
        compare(result(rows), result(rows, seed=1))


def test_the_hash_depends_on_every_part():
    changes = [{}, {"seed": 1}, {"threshold": 0.5}, {"reward": {}}, {"sampling": {}},
               {"prompt_ids": (0, 1)}]  # fmt: skip
    specs = [a_spec(**change) for change in changes]
    specs += [a_spec(answers="math"), a_spec(part="right"), a_spec(samples=3), a_spec(n=5),
              TextEvaluationSpec.of(a_dataset(answer="2"), samples=2, sampling=specs[0].sampling,
                                    reward=specs[0].reward, threshold=1.0)]  # fmt: skip
    assert len({spec.sha256 for spec in specs}) == len(specs)
    assert a_spec().sha256 == specs[0].sha256


def test_seeds_are_all_different_and_depend_on_the_prompt_alone():
    spec, part = a_spec(n=50, samples=8), a_spec(n=50, samples=8, prompt_ids=(7, 9))
    seeds = [seed for number in spec.prompt_ids for seed in spec.seeds(number)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert spec.seeds(7) == part.seeds(7) != a_spec(n=50, samples=8, seed=1).seeds(7)
    assert a_spec(n=50, samples=3).seeds(7) == spec.seeds(7)[:3]


def test_files_are_read_back_and_changes_noticed(tmp_path):
    spec = a_spec()
    spec.save(tmp_path / "spec.json")
    assert TextEvaluationSpec.load(tmp_path / "spec.json") == spec
    text = (tmp_path / "spec.json").read_text()
    (tmp_path / "spec.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        TextEvaluationSpec.load(tmp_path / "spec.json")
    found = result([[1, 0], [0, 0]], [("1", None), ("2", "3")])
    found.save(tmp_path / "result.json")
    assert TextEvaluationResult.load(tmp_path / "result.json") == found
    with pytest.raises(ConfigError, match="is no file of the format"):
        TextEvaluationResult.load(tmp_path / "spec.json")
    (tmp_path / "spec.json").write_text(text.replace('"samples"', '"sample"'))
    with pytest.raises(ConfigError, match="is no specification"):
        TextEvaluationSpec.load(tmp_path / "spec.json")


def test_illegal_specifications_are_refused():
    for changes, reason in [
        ({"prompt_ids": ()}, "at least one prompt"),
        ({"prompt_ids": (1, 1)}, "every prompt once"),
        ({"prompt_ids": (4,)}, "prompts 0 to 3, not 4"),
        ({"samples": 0}, "not 0"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            a_spec(**changes)
    a_spec().check_dataset(a_dataset())
    with pytest.raises(ConfigError, match="prompts, answers, template or tokenizer differ"):
        a_spec().check_dataset(a_dataset(answer="2"))


def test_outcomes_must_be_those_of_the_specification():
    spec = a_spec(n=2, samples=2)
    right = [outcome(0, [1, 0]), outcome(1, [1, 1])]
    for outcomes, reason in [
        (right[:1], "are not the 2"),
        ([*right, right[0]], "answered twice"),
        ([right[0], outcome(2, [1, 1])], "are not the 2"),
        ([right[0], outcome(1, [1])], "prompt 1 has not 2 completions"),
        ([right[0], outcome(1, [1, 1], ("a",))], "prompt 1 has not 2 completions"),
        ([right[0], outcome(1, [1, 1], texts=("a",))], "prompt 1 has not 2 completions"),
    ]:
        with pytest.raises(ValueError, match=reason):
            TextEvaluationResult.of(spec, outcomes, "run@1")


def test_outcomes_of_groups_and_what_is_told_beside_the_scores():
    def a_completion(n, stop):
        return Completion(tokens=np.zeros(n, np.int64), log_probs=np.zeros(n, np.float32),
                          versions=np.zeros(n, np.int64), stop_reason=stop, seed=0)  # fmt: skip

    scores = (Score(reward=1.0), Score(reward=0.5), Score(reward=9.0, valid=False, reason="time"))
    group = PromptGroup(
        prompt_id=0, draw=0, prompt_tokens=np.array([1]), answer=None,
        completions=tuple(a_completion(n, s) for n, s in [(2, "stop"), (4, "length"), (3, "stop")]),
        scores=scores,
    )  # fmt: skip
    said = {"prompt": "1 + 1 =", "texts": ["a", "b", "c"]}
    first = PromptOutcome.of(group, threshold=1.0, answers=["1", "2", None], level=3, **said)
    assert (first.prompt, first.texts) == ("1 + 1 =", ("a", "b", "c"))
    assert first.rewards == (1.0, 0.5, None)
    assert first.correct == (True, False, False)  # an invalid score is never right
    parts = [{"right": 0.0, "short": 1.0}, {"right": 1.0, "short": -0.5}, {}]
    told = tuple(replace(score, parts=part) for score, part in zip(scores, parts, strict=True))
    by_part = PromptOutcome.of(replace(group, scores=told), threshold=1.0, part="right")
    assert by_part.correct == (False, True, False)
    found = TextEvaluationResult.of(a_spec(n=1, samples=3), [first], "run@1")
    assert (found.mean_length, found.n_invalid) == (3.0, 1)
    assert found.truncated_share == pytest.approx(1 / 3)
    assert str(found).endswith(f"(n = 3, spec {found.spec_sha256[:12]}, 1 completions not scored)")
    group = PromptGroup(prompt_id=0, draw=0, prompt_tokens=np.array([1]), answer=None,
                        completions=group.completions)  # fmt: skip
    with pytest.raises(ValueError, match="no scores"):
        PromptOutcome.of(group, threshold=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt_ids": ("0", 1)}, "prompt_ids: '0' is no whole number from 0 on"),
        ({"prompt_ids": (0, -1)}, "prompt_ids: -1 is no whole number from 0 on"),
        ({"prompt_ids": (0, True)}, "prompt_ids: True is no whole number"),
        ({"samples": 2.0}, "samples: 2.0 is no whole number"),
        ({"samples": 0}, "needs samples of each prompt"),
        ({"seed": None}, "seed: None is no whole number"),
        ({"threshold": "0.5"}, "threshold: '0.5' is no number"),
        ({"threshold": float("nan")}, "threshold: nan is no number"),
        ({"answers": "letters"}, "answers: 'letters' is none of: math, letter, null"),
    ],
)
def test_a_specification_that_was_written_by_hand_is_looked_at(changes, told):
    with pytest.raises(ConfigError, match=told):
        replace(a_spec(), **changes)


def test_prompts_that_a_set_has_not_are_refused():
    spec = replace(a_spec(4), prompt_ids=(0, 4))
    with pytest.raises(ConfigError, match="the set has prompts 0 to 3, not 4"):
        spec.check_dataset(a_dataset(4))
