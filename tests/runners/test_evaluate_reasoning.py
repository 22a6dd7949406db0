"""Evaluations of finished runs that are to be compared: one specification, one reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("transformers")

from rlinf.cli.main import main
from rlinf.data.text_evaluation import TextEvaluationSpec
from rlinf.engines.config import HFEngineConfig, Refusal
from rlinf.errors import ConfigError
from rlinf.runners import groups
from rlinf.runners.evaluation import evaluate
from rlinf.runners.reasoning import Reasoning

from .reasoning_support import train, write_recipe

SHORT = ("runner.total_steps=1", "warm_start=null", "validation.val_check_interval=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("one"), *SHORT)


@pytest.fixture
def _no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> NoReturn:
        pytest.fail("workers were started")

    monkeypatch.setattr(groups, "Groups", started)


@pytest.mark.usefixtures("_no_system")
def test_a_specification_of_another_reward_and_prompts_that_are_not_there_are_refused(
    run: Path, tmp_path: Path
) -> None:
    spec = TextEvaluationSpec.load(run / "evaluations" / "validation_spec.json")
    other = {"answer": {**spec.reward["answer"], "found_value": 0.5}}
    replace(spec, reward=other).save(tmp_path / "spec.json")
    with pytest.raises(ConfigError, match=r"for the reward .*0\.5.*the run has .*0\.2"):
        evaluate(Reasoning, run, spec=tmp_path / "spec.json")
    for changes, told in (
        ({"part": "nothere"}, r"part: 'nothere'; known: answer"),
        ({"sampling": {**spec.sampling, "temperature": -1}}, r"temperature = -1: must be > 0"),
        ({"sampling": {"temperatur": 1.0}}, r"did you mean `temperature`"),
        ({"prompt_ids": (0, 500)}, r"the set has prompts 0 to \d+, not 500"),
    ):
        replace(spec, **changes).save(tmp_path / "spec.json")
        with pytest.raises(ConfigError, match=told):
            evaluate(Reasoning, run, spec=tmp_path / "spec.json")
    with pytest.raises(ConfigError, match=r"--episodes 9999: there are (\d+) prompts; nearest: \1"):
        evaluate(Reasoning, run, items=9999)


def test_a_directory_that_a_recipe_is_to_begin_with_is_evaluated_without_a_warm_start(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = ["~model.architecture", f"model.path={run}/model", f"runner.output_dir={tmp_path}"]
    assert main(["eval", str(write_recipe(tmp_path)), *began]) == 0
    assert "warm start" not in capsys.readouterr().out
    evaluated = tmp_path / "small_eval" / "latest"
    assert list((evaluated / "evaluations").glob("spec_*.json"))
    assert not (evaluated / "initial_model").exists()


def test_the_second_run_is_evaluated_by_the_specification_of_the_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(tmp_path, *SHORT, "validation.prompts=5", "validation.seed=4")
    result = evaluate(Reasoning, run, items=6, compare=(Reasoning, other))
    assert len(result.outcomes) == 6
    name = f"spec_{result.spec_sha256[:12]}_step_00000001.json"
    found = json.loads((other / "evaluations" / name).read_text())
    assert found["spec_sha256"] == result.spec_sha256


def test_other_settings_of_the_engine_give_the_same_answers(run: Path) -> None:
    first = evaluate(Reasoning, run, items=6)
    for given in (
        ("rollout.engine.max_running_requests=2",),
        ("~rollout.engine", "rollout.engine.type=hf", "~weight_sync", "weight_sync.type=bucket"),
    ):
        assert evaluate(Reasoning, run, overrides=given, items=6) == first


def test_an_engine_without_log_probs_for_training_evaluates_what_was_trained(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unscored = Refusal("top_p", "changes what it reports", "nearest: 1.0")
    monkeypatch.setattr(HFEngineConfig, "unscored", lambda config, sampling: unscored)
    other = "rollout.engine.max_running_requests=3"
    assert main(["eval", str(run), other, "--episodes", "2"]) == 0
    began = ["~model.architecture", f"model.path={run}/model", f"runner.output_dir={tmp_path}"]
    recipe = str(write_recipe(tmp_path))
    assert main(["eval", recipe, *began, "--dry-run"]) == 0
    for words in (["resume", str(run), "runner.total_steps=2"], ["train", recipe]):
        capsys.readouterr()
        assert main([*words, other]) == 2
        assert "changes what it reports; nearest: 1.0" in capsys.readouterr().err


def test_a_reward_that_fails_is_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "if sample.num_tokens % 2: raise ValueError('no judge')"
    (tmp_path / "judge.py").write_text(f"def score(sample):\n    {body}\n    return 1.0\n")
    reward = f"{{answer: {{type: function, function: '{tmp_path}/judge.py:score'}}}}"
    run = train(tmp_path, *SHORT, "~reward.functions", f"reward.functions={reward}")
    caplog.clear()
    result = evaluate(Reasoning, run)
    assert 0 < result.n_invalid < len(result.outcomes)
    assert f"{result.n_invalid} completions not scored" in str(result)
    (told,) = (each for each in caplog.messages if "cannot be scored, and counts as wrong" in each)
    assert "ValueError: no judge" in told
