"""Reasoning runs: the same under any placement, and after an interruption."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.cli.main import main
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.runners.evaluation import evaluate
from rlinf.runners.reasoning import Reasoning
from rlinf.scheduler.cpu_slots import available_cores
from tests.conftest import drawing

from .reasoning_support import assert_equal_runs, resume, small_config, train, untimed

PLACEMENTS = {
    "one device": "{'rollout,reward,actor': '0'}",
    "disaggregated": "{'rollout,reward': '0', actor: '1'}",
    "hybrid": "{rollout: '0', reward: '1', actor: '0'}",
    "two engines": "{rollout: '0-1', reward: '1', actor: '0'}",
}

needs_two_cores = pytest.mark.skipif(
    len(available_cores()) < 2, reason="two CPU slots need two cores"
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with drawing():
        return train(tmp_path_factory.mktemp("reference"))


def test_what_a_run_leaves_behind(reference: Path) -> None:
    lines = untimed(reference)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1]["rollout/prompts"] == 16
    assert all(line["actor/optimizer_steps"] == 2 for line in lines[1:])
    assert {"eval/success", "eval/success_low", "eval/pass@1"} <= lines[0].keys()
    assert (reference / "initial_model" / "config.json").is_file()
    assert (reference / "model" / "tokenizer.json").is_file()
    assert (reference / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((reference / "evaluations/validation_step_00000004.json").read_text())
    assert result["samples"] == 1


def test_completions_are_kept_of_the_first_prompts_of_each_step(
    reference: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path)
    files = sorted((reference / "completions").iterdir())
    assert [file.name for file in files] == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len(lines) == config.rollout.group_size
    assert {line["prompt"] for line in lines} == {lines[0]["prompt"]}
    assert lines[0]["prompt"]
    assert all(
        line["step"] == 2 and line["parts"].keys() == config.reward.functions.keys()
        for line in lines
    )
    assert all(line["reward"] is not None for line in lines)
    assert all(line["tokens"] >= 1 and line["completion"] for line in lines)

    several = train(tmp_path, "runner.total_steps=1", "runner.completions_kept=2")
    lines = [json.loads(line) for line in (several / "completions/1.jsonl").open()]
    assert len(lines) == 2 * config.rollout.group_size
    assert lines[: config.rollout.group_size] == [
        json.loads(line) for line in files[0].read_text().splitlines()
    ]
    none = train(tmp_path / "none", "runner.total_steps=1", "runner.completions_kept=0")
    assert not (none / "completions").exists()


def test_the_trained_model_is_one_of_transformers(reference: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference / "model")
    model = AutoModelForCausalLM.from_pretrained(reference / "model")
    prompt = tokenizer("312", return_tensors="pt", add_special_tokens=False)
    found = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert found.shape[1] > prompt["input_ids"].shape[1]


def test_a_checkpoint_becomes_a_model(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, last = (f"{reference}/checkpoints/step_0000000{step}" for step in (2, 4))
    assert main(["convert", "run", earlier, "--out", str(tmp_path / "earlier")]) == 0
    assert main(["convert", "run", last, "--out", str(tmp_path / "last")]) == 0
    assert f"the model of {reference.name} step 4" in " ".join(capsys.readouterr().out.split())
    left = sorted((reference / "model").iterdir())
    assert sorted(file.name for file in (tmp_path / "last").iterdir()) == [f.name for f in left]
    for file in left:
        assert (tmp_path / "last" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    before, after = ((tmp_path / name / weights).read_bytes() for name in ("earlier", "last"))
    assert before != after
    assert len(before) == len(after)


@needs_two_cores
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    run = train(
        tmp_path,
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS[placement]}",
    )
    assert_equal_runs(reference, run)


# The start is taught by workers of its own, which take as long to begin as all others.
@needs_two_cores
@pytest.mark.parametrize("taught", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ray_gives_the_same_as_local(reference: Path, tmp_path: Path, taught: bool) -> None:
    given = ("~model.architecture", f"model.path={reference}/initial_model", "~warm_start")
    run = train(
        tmp_path,
        *(given if taught else ()),
        "cluster.runtime=ray",
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS['disaggregated']}",
    )
    assert_equal_runs(reference, run)


def test_seeds_give_different_runs(reference: Path, tmp_path: Path) -> None:
    other = train(tmp_path, "seed=4", "runner.total_steps=1")
    assert untimed(other)[1] != untimed(reference)[1]


class StopAfter(threading.Event):
    """Set once it has been asked a number of times since the workers were there."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self._left = questions + 2  # before and after they are launched

    def is_set(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.set()
        return super().is_set()


@pytest.mark.parametrize("questions", [1, 3])
def test_interrupted_and_resumed(
    reference: Path, tmp_path: Path, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings, close = [], MetricsLog.close

    def closed(metrics: MetricsLog) -> None:
        endings.append(metrics.ending)
        close(metrics)

    monkeypatch.setattr(MetricsLog, "close", closed)
    run = train(tmp_path, stop=StopAfter(questions))
    done = len(untimed(run))
    assert done < 5
    resume(run, small_config(tmp_path))
    assert endings == ["interrupted", "finished"]
    assert_equal_runs(reference, run)


def test_a_run_that_goes_on_after_its_end_keeps_the_evaluation_of_the_end(
    reference: Path, tmp_path: Path
) -> None:
    run = train(tmp_path, "runner.total_steps=3")
    lines = untimed(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    end = lines[-1]
    manifest = json.loads((run / "checkpoints/step_00000003/manifest.json").read_text())
    assert manifest["metric"] == end["eval/success"]
    resume(run, small_config(tmp_path))
    assert untimed(run) == [*lines, untimed(reference)[-1]]


def test_evaluation_of_a_run_repeats_its_last_one(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(Reasoning, reference)
    assert result.estimate("pass@1").value == untimed(reference)[-1]["eval/success"]
    assert result.spec_sha256[:12] in capsys.readouterr().out


def test_every_reward_function_is_logged_and_one_tells_what_is_right(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "reward.functions.short={type: length, max_length: 12, cache_length: 8, weight: 0.5}",
        "reward.functions.form={type: format, form: pattern, pattern: '.*', weight: 0}",
        "validation.correct_by=answer",
        "runner.total_steps=2",
    )
    trained = [line for line in untimed(run) if "rollout/rewards" in line]
    assert len(trained) == 2
    for line in trained:
        assert line["reward/form"] == 1.0
        total = line["reward/answer"] + 0.5 * line["reward/short"]
        assert line["rollout/rewards"] == pytest.approx(total, abs=1e-6)
    # With the length in the sum, an answer of 20 % or more would be right only where it is short.
    spec = json.loads((run / "evaluations" / "validation_spec.json").read_text())
    assert spec["part"] == "answer"
