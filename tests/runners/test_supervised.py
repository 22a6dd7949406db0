"""Supervised runs: they learn, validate, stop, leave something to begin with, and refuse."""

from __future__ import annotations

import errno
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlinf.checkpoint import store as store_module
from rlinf.checkpoint.manifest import Manifest
from rlinf.cli.main import main
from rlinf.data.tasks import SortingTask, SquaresTask
from rlinf.data.text_examples import TextExample, TextExamples
from rlinf.errors import CheckpointError, ConfigError
from rlinf.runners.behaviour_cloning import BehaviourCloning
from rlinf.runners.evaluation import evaluate
from rlinf.workers.source import SourceWorker, Texts

from . import reasoning_support, support
from .supervised_support import (
    assert_equal_runs,
    metrics,
    run_recipe,
    weights,
    write_cloning,
    write_fine_tuning,
)

WRITERS = {"sft": write_fine_tuning, "cloning": write_cloning}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_loss_falls_and_so_does_that_of_validation(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = run_recipe(WRITERS[kind](tmp_path), tmp_path / "run", "runner.total_steps=30")
    lines = metrics(run.directory.path)
    assert lines[-1]["train/loss"] < 0.9 * lines[0]["train/loss"]
    validated = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert len(validated) == 15
    assert validated[-1] < 0.9 * validated[0]
    assert lines[-1]["train/rows"] == 30 * (16 if kind == "sft" else 32)
    assert lines[-1]["train/terms"] > 29 * lines[0]["train/terms"] / 2  # of the run, not the step
    assert (run.directory.path / "learning_curve.png").exists()


def test_a_language_model_is_left_behind_that_a_reasoning_run_begins_with(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_recipe(write_fine_tuning(tmp_path), tmp_path / "run")
    model = tmp_path / "run" / "model"
    recipe = reasoning_support.write_recipe(tmp_path)
    words = ["train", str(recipe), "--run-dir", str(tmp_path / "reasoning")]
    taken = [f"model.path={model}", "model.architecture=null", "warm_start=null"]
    assert main([*words, *taken, "runner.total_steps=1"]) == 0
    assert not (tmp_path / "reasoning" / "initial_model").exists()


def test_a_policy_is_left_behind_that_an_embodied_run_begins_with(tmp_path: Path) -> None:
    run_recipe(write_cloning(tmp_path), tmp_path / "run")
    policy = tmp_path / "run" / "policy.safetensors"
    recipe = support.write_recipe(tmp_path)
    words = ["train", str(recipe), "model.hidden_sizes=[16]", f"model.path={policy}"]
    rest = ["actor.optim.lr=1.0e-30", "runner.total_env_steps=128"]
    assert main([*words, *rest, "--run-dir", str(tmp_path / "ppo")]) == 0
    begun, cloned = weights(tmp_path / "ppo"), weights(tmp_path / "run")
    for name, value in cloned.items():
        if name.startswith("actor"):  # the statistics of observations go on
            np.testing.assert_allclose(begun[name], value, atol=1e-6)
    assert any(name.startswith("critic") for name in begun)
    # Of other shapes: said before anything is trained.
    assert main([*words, *rest, "model.hidden_sizes=[8]"]) == 2


def test_a_run_that_had_ended_says_so_when_it_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(write_cloning(tmp_path)), "--run-dir", str(run)]) == 0
    assert "nothing is left" not in capsys.readouterr().out
    # What never was played while it trained has no specification.
    assert [each.name for each in (run / "evaluations").glob("*_spec.json")] == [
        "held_out_spec.json"
    ]
    with (run / "metrics.jsonl").open("a") as file:  # as of what came after the last checkpoint
        file.write('{"step": 6, "eval/success": 1.0}\n')
    left = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = "nothing is left to train: 6 of 6 steps were done; to go on, resume with a larger"
    with monkeypatch.context() as patched:
        patched.setattr("rlinf.runners.groups.Groups.__enter__", None)  # no worker starts
        assert main(["resume", str(run)]) == 0
    assert f"{said} runner.total_steps" in capsys.readouterr().out
    changed = {path.name for path, before in left.items() if path.read_bytes() != before}
    assert changed <= {"run.log"}
    # One that was cut off in its last evaluation makes up for it.
    (run / "end.json").unlink()
    (run / "policy.safetensors").unlink()
    assert main(["resume", str(run)]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "held-out episodes: " in out
    assert (run / "policy.safetensors").is_file()
    assert main(["resume", str(run), "runner.total_steps=4"]) == 0
    assert "6 steps, more than these 4, were done" in capsys.readouterr().out
    assert main(["resume", str(run), "runner.total_steps=7"]) == 0
    assert "nothing is left" not in capsys.readouterr().out
    # Without its checkpoints it is not trained again over what it reached.
    shutil.rmtree(run / "checkpoints")
    left = (run / "metrics.jsonl").read_bytes()
    assert main(["resume", str(run)]) == 2
    assert "has ended and its checkpoints are gone" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == left
    (run / "end.json").unlink()  # one that was killed before its first checkpoint begins again
    assert main(["resume", str(run)]) == 0
    assert "no checkpoint had been committed: the run begins again" in capsys.readouterr().out


def test_a_language_model_is_not_evaluated_but_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    run = tmp_path / "run"
    run_recipe(write_fine_tuning(tmp_path), run, "runner.total_steps=1")
    with monkeypatch.context() as patched:
        patched.setattr("rlinf.workers.initial_model.write_initial_model", None)
        patched.setattr("rlinf.checkpoint.store.CheckpointStore.load", None)
        assert main(["eval", str(run)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "runs of task 'sft' are not evaluated; its model answers prompts by: " in told
    command = told.partition("answers prompts by: rlinf eval ")[2].partition("; its losses")[0]
    assert f"model.path={run / 'model'} " in command
    assert main(["eval", *shlex.split(command), "--dry-run", f"runner.output_dir={tmp_path}"]) == 0
    # One that learnt from files answers a file.
    examples, questions = tmp_path / "examples.jsonl", tmp_path / "questions.jsonl"
    examples.write_text('{"prompt": "12", "answer": "12"}\n' * 4)
    questions.write_text('{"problem": "12", "answer": "12", "level": 1}\n')
    files = f"data.files={{train: [{examples}]}}"
    given = ("~data.task", files, "~model.architecture", "~validation")
    other = tmp_path / "other"
    model = f"model.path={run / 'model'}"
    run_recipe(write_fine_tuning(tmp_path), other, *given, model, "runner.total_steps=1")
    assert main(["eval", str(other)]) == 2
    command = f"rlinf eval evaluation/math500 model.path={other / 'model'} benchmark.path="
    assert command in " ".join(capsys.readouterr().err.split())
    words = [*command.split()[2:-1], f"benchmark.path={questions}", "--dry-run"]
    assert main(["eval", *words, f"runner.output_dir={tmp_path}"]) == 0


def test_a_run_ends_where_the_validation_loss_falls_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_cloning(tmp_path)
    ended = ["runner.total_steps=60", "validation.patience=2", "validation.min_improvement=10"]
    run = run_recipe(recipe, tmp_path / "run", *ended)
    # The first is better than none; then two are waited for.
    assert run.state.step == 6
    assert "validation.patience ended it after step 6 of 60\n" in capsys.readouterr().out
    best = [line["validation/loss"] for line in metrics(tmp_path / "run")[1::2]]
    # What is left behind is what was best, though not by enough to go on.
    assert run.state.best_score == -min(best)


def test_a_run_plays_and_ends_where_it_succeeds_often_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An episode succeeds once its return passes a bound that all of them pass, or none."""
    given = ("interval=2", "start=3", "periodic_episodes=4", "stop_at_success=0.5")
    played = [*(f"evaluation.{each}" for each in given), "env.train.options.success_return=-1.0e6"]
    run = run_recipe(write_cloning(tmp_path), tmp_path / "run", *played)
    assert run.state.step == 4
    assert "evaluation.stop_at_success ended it after step 4 of 6\n" in capsys.readouterr().out
    lines = metrics(tmp_path / "run")
    success = [line["eval/success"] for line in lines if "eval/success" in line]
    assert success == [1.0]
    assert len([line for line in lines if "validation/loss" in line]) == 2
    never = [*played[:-1], "env.train.options.success_return=1.0e6"]
    run = run_recipe(write_cloning(tmp_path), tmp_path / "other", *never)
    # Where none succeeds, the best are those with the highest return.
    returns = [line["eval/return"] for line in metrics(tmp_path / "other") if "eval/return" in line]
    assert run.state.step == 6
    assert " ended it " not in capsys.readouterr().out
    assert run.state.best_score == (max(returns[:2]) / (1 - max(returns[:2])) - 1) / 2
    with pytest.raises(ConfigError, match=r"evaluation.stop_at_success.*without interval"):
        run_recipe(write_cloning(tmp_path), tmp_path / "none", played[3])


def test_the_best_weights_are_left_behind(tmp_path: Path) -> None:
    """With a rate so large that the loss rises in the end."""
    recipe = write_cloning(tmp_path)
    options = ["actor.optim.lr=0.3", "actor.optim.max_grad_norm=null", "validation.interval=1"]
    run = run_recipe(recipe, tmp_path / "run", "runner.total_steps=8", *options)
    losses = [line["validation/loss"] for line in metrics(tmp_path / "run")]
    best = int(np.argmin(losses)) + 1
    assert best < 8, "the loss was to rise"
    shorter = run_recipe(recipe, tmp_path / "other", f"runner.total_steps={best}", *options)
    assert shorter.state.step == best
    for name, value in weights(tmp_path / "run").items():
        np.testing.assert_array_equal(value, weights(tmp_path / "other")[name])
    assert run.state.best_score == -losses[best - 1]
    # An evaluation plays them, too.
    result = evaluate(BehaviourCloning, tmp_path / "run", items=2)
    assert result.checkpoint == f"run step {best}"


@pytest.mark.parametrize("full_from", [1, 2])
def test_on_a_full_disk_what_is_told_is_what_is_left_behind(
    full_from: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the best weights did not fit, those of the last step or the best that are kept count,
    and the run does not end as if its last checkpoint were there."""
    real = store_module.write_files

    def write(directory: Path, manifest: Manifest, *rest: Any) -> None:
        if manifest.step >= full_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(directory, manifest, *rest)

    monkeypatch.setattr(store_module, "write_files", write)
    recipe = write_cloning(tmp_path)
    options = ["runner.total_steps=3", "validation.interval=1"]
    with pytest.raises(CheckpointError, match=r"last step, 3, was not written.*No space left"):
        run_recipe(recipe, tmp_path / "run", *options)
    losses = [line["validation/loss"] for line in metrics(tmp_path / "run")]
    assert losses == sorted(losses, reverse=True), "the last was to be the best"
    assert f"smallest validation loss: {losses[-1]:.4f}, after step 3" in capsys.readouterr().out
    monkeypatch.undo()
    run_recipe(recipe, tmp_path / "other", *options)
    for name, value in weights(tmp_path / "run").items():
        np.testing.assert_array_equal(value, weights(tmp_path / "other")[name])


def test_of_the_weights_that_are_kept_the_best_are_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_cloning(tmp_path)
    options = ["actor.optim.lr=0.3", "actor.optim.max_grad_norm=null", "validation.interval=1"]
    keep = ["checkpoint.keep_best=0", "checkpoint.keep_last=1", "checkpoint.interval=100"]
    run_recipe(recipe, tmp_path / "run", "runner.total_steps=8", *options, *keep)
    losses = [line["validation/loss"] for line in metrics(tmp_path / "run")]
    assert min(losses) < losses[-1], "the loss was to rise"
    assert f"smallest validation loss: {losses[-1]:.4f}, after step 8" in capsys.readouterr().out
    assert "the weights of the best evaluation are not among those that were kept" in caplog.text


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_and_sources_elsewhere_change_nothing(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    recipe = write_cloning(tmp_path)
    run_recipe(recipe, tmp_path / "one")
    place = f"{{source: '1', actor: '0-{ranks - 1}', 'env,rollout': '0'}}"
    placed = [f"cluster.component_placement={place}", f"cluster.cpu_devices_per_node={ranks}"]
    run_recipe(recipe, tmp_path / "several", *placed)
    assert_equal_runs(tmp_path / "one", tmp_path / "several")


def test_only_adapters_are_trained_with_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    recipe = write_fine_tuning(tmp_path)
    run_recipe(recipe, tmp_path / "run", "actor.lora={rank: 4}", "runner.total_steps=4")
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors").exists()
    before = load_file(tmp_path / "run" / "initial_model" / "model.safetensors")
    after = weights(tmp_path / "run")
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert changed
    assert all("proj" in name for name in changed)  # merged into the layers that have adapters
    lines = metrics(tmp_path / "run")
    assert lines[-1]["validation/loss"] < lines[1]["validation/loss"]


def test_a_policy_learns_by_adapters_and_is_left_behind_whole(tmp_path: Path) -> None:
    recipe = write_cloning(tmp_path)
    run_recipe(recipe, tmp_path / "whole", "runner.total_steps=1")
    lora = ["actor.lora.rank=1", "runner.total_steps=30"]
    run_recipe(recipe, tmp_path / "run", *lora)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert weights(tmp_path / "run").keys() == weights(tmp_path / "whole").keys()
    assert main(["eval", str(tmp_path / "run"), "--episodes", "4"]) == 0


def test_a_validation_that_never_comes_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_recipe(write_cloning(tmp_path), tmp_path / "run", "validation.interval=50")
    told = "validation.interval = 50 is more than the 6 steps of the run"
    assert caplog.text.count(told) == 1
    assert "warmup_steps" not in caplog.text


def test_a_batch_that_ends_cloning_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_cloning(tmp_path), tmp_path / "run"
    wild = ("actor.optim={lr: 1.0e+30, max_grad_norm: null}", "actor.max_skipped_updates=0")
    assert main(["train", str(recipe), "--run-dir", str(run), *wild]) == 1
    (batch,) = (run / "failures").glob("actor_batch_of_step_*.safetensors")
    assert str(batch) in capsys.readouterr().err
    assert load_file(batch)["inputs.raw_actions"].ndim == 3


def test_a_warm_up_that_does_not_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ("runner.total_steps=1", "actor.lr_sched={warmup_steps: 1}")
    run_recipe(write_cloning(tmp_path), tmp_path / "run", *short)
    told = "actor.lr_sched.warmup_steps = 1 is not less than the 1 steps of the run"
    assert caplog.text.count(told) == 1


def test_a_run_goes_on_with_the_pictures_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of examples names them, and stays the same where they are replaced."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    recipe, once = write_fine_tuning(tmp_path), "runner.total_steps=1"
    run_recipe(
        recipe, tmp_path / "first", once, "data.task={type: squares, levels: [2], size: 40}",
        "model.architecture={type: qwen3_vl, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, "
        "intermediate_size: 48, max_position_embeddings: 48, vision: {hidden_size: 16, heads: 2, "
        "layers: 1, intermediate_size: 32, patch_size: 8}}",
    )  # fmt: skip
    items = SquaresTask(levels=(2,), size=4, held_out=1).items("train")
    with (tmp_path / "a.jsonl").open("w") as file:
        for number, item in enumerate(items):
            (tmp_path / f"{number}.ppm").write_bytes(item.pictures[0])
            told = {"prompt": item.prompt, "answer": item.target, "seen": f"{number}.ppm"}
            file.write(json.dumps(told) + "\n")
    seeing = (
        "data.task=null",
        "~validation",
        f"data.files={{train: [{tmp_path}/a.jsonl], image_key: seen}}",
        "model.architecture=null",
        f"model.path={tmp_path}/first/model",
    )
    run_recipe(recipe, tmp_path / "run", *seeing, once)
    with monkeypatch.context() as before:  # as runs were written that know no hash
        before.delattr(SourceWorker, "state")
        run_recipe(recipe, tmp_path / "old", *seeing, once)
    assert main(["resume", str(tmp_path / "run"), "runner.total_steps=2"]) == 0
    (tmp_path / "0.ppm").write_bytes(items[1].pictures[0])
    assert main(["resume", str(tmp_path / "old"), "runner.total_steps=2"]) == 0
    assert main(["resume", str(tmp_path / "run"), "runner.total_steps=3"]) == 2
    assert "the examples changed after the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "held_out", "same"), [(6, 1, False), (8, 0, True)])
def test_a_run_whose_turns_were_counted_is_not_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: int,
    held_out: int,
    same: bool,
) -> None:
    pytest.importorskip("transformers")
    recipe, once = write_fine_tuning(tmp_path), "runner.total_steps=1"
    run_recipe(recipe, tmp_path / "first", once)
    items = SortingTask(levels=(3,), size=8, held_out=1).items("train")
    said = [[("user", item.prompt), ("assistant", item.target)] for item in items]
    with (tmp_path / "a.jsonl").open("w") as file:
        for one, other in zip(said[::2], said[1::2], strict=True):
            talk = [{"role": role, "content": text} for role, text in (*one, *other)]
            file.write(json.dumps({"prompt": talk}) + "\n")
    template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    (tmp_path / "a.jinja").write_text(template)
    talks = (
        f"model.path={tmp_path}/first/model",
        "model.architecture=null",
        f"data={{task: null, held_out: {held_out}, apply_chat_template: true}}",
        f"data.files={{train: [{tmp_path}/a.jsonl], answer_key: null, turns: all, limit: {limit}}}",
        f"data.chat_template={tmp_path}/a.jinja",
        "actor.global_batch_size=2",
        "actor.micro_batch_size=2",
        *(() if held_out else ("~validation",)),
    )
    with monkeypatch.context() as before:  # as runs were written that know no hash
        before.delattr(SourceWorker, "state")
        run_recipe(recipe, tmp_path / "old", *talks, once)
    assert main(["resume", str(tmp_path / "old"), "runner.total_steps=2"]) == (0 if same else 2)
    assert ("which `rlinf convert run` writes" in capsys.readouterr().err) != same


def test_the_longest_rows_are_those_of_most_tokens() -> None:
    """So that memory is looked at with them."""
    lengths = [3, 9, 2, 7, 5]
    examples = tuple(
        TextExample(np.zeros(length - 1, np.int64), np.zeros(1, np.int64)) for length in lengths
    )
    rows = Texts(TextExamples(examples, ""))
    assert [lengths[row] for row in rows.longest(3)] == [9, 7, 5]
    assert [lengths[row] for row in rows.longest(7)] == [9, 7, 5, 3, 2, 9, 7]


def test_a_run_without_validation_can_be_used(tmp_path: Path) -> None:
    """Its config holds the section that is of no effect, with its defaults."""
    recipe = write_cloning(tmp_path)
    text = recipe.read_text().replace("validation: {interval: 2}\n", "")
    recipe.write_text(text.replace(", held_out: 2", ""))
    run_recipe(recipe, tmp_path / "run", "runner.total_steps=2")
    assert "interval: 50" in (tmp_path / "run" / "config.yaml").read_text()
    assert main(["resume", str(tmp_path / "run"), "runner.total_steps=3"]) == 0
    assert len(metrics(tmp_path / "run")) == 3
    assert main(["eval", str(tmp_path / "run"), "--episodes", "4"]) == 0


@pytest.mark.parametrize("objective", ["likelihood", "squared_error"])
def test_objectives_of_behaviour_cloning(objective: str, tmp_path: Path) -> None:
    recipe = write_cloning(tmp_path)
    run_recipe(recipe, tmp_path / "run", f"objective={objective}", "runner.total_steps=2")
    first = metrics(tmp_path / "run")[0]["train/loss"]
    # Fresh weights give about the mode 0 with the standard deviation 1.
    recorded = first if objective == "squared_error" else 2 * (first - 0.5 * math.log(2 * math.pi))
    assert 0.5 < recorded < 2
    std = weights(tmp_path / "run")["log_std"]
    assert (std == 0).all() == (objective == "squared_error")


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("sft", ["actor.update_epoch=2"], "nearest: 1, and more runner.total_steps"),
        ("sft", ["model.lora={rank: 2}"], "write it as actor.lora"),
        (
            "sft",
            ["data.task=null", "data.files={train: [a.jsonl]}", "data.held_out=1"],
            "model.path",
        ),
        ("sft", ["data.max_length=2"], "no example is left"),
        ("cloning", ["data.held_out=0"], "nothing validates"),
        ("cloning", ["data.held_out=6"], "6 of 6 episodes cannot be held out"),
        ("cloning", ["data.path=nowhere"], "rlinf record"),
        ("cloning", ["actor.micro_batch_size=5"], "does not divide the 32 rows of a rank"),
        ("cloning", ["model.num_action_chunks=0"], "num_action_chunks"),
        ("cloning", ["env.train.options.id=MountainCarContinuous-v0"], "observation_shapes"),
        ("cloning", ["cluster.component_placement={source: '0'}"], "does not place actor"),
    ],
)
def test_what_cannot_be_is_said(
    kind: str, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    recipe = WRITERS[kind](tmp_path)
    run = tmp_path / "run"
    assert main(["train", str(recipe), *words, "--run-dir", str(run)]) == 2
    assert told in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_ranks_of_a_language_model_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes divide the model and each batch; sums of several ranks round otherwise."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    recipe = write_fine_tuning(tmp_path)
    run_recipe(recipe, tmp_path / "one")
    place = "{source: '0', actor: '0-1'}"
    placed = [f"cluster.component_placement={place}", "cluster.cpu_devices_per_node=2"]
    run_recipe(recipe, tmp_path / "two", *placed, "cluster.runtime=ray")
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert ("validation/loss" in one) == ("validation/loss" in two)
        for name in {"train/loss", "validation/loss"} & one.keys():
            assert one[name] == pytest.approx(two[name], rel=1e-3), name
    before, after = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in before.items():
        np.testing.assert_allclose(value, after[name], atol=2e-3, err_msg=name)


def test_the_held_out_result_is_of_the_step_whose_weights_are_left_behind(tmp_path: Path) -> None:
    worse = ("actor.optim.lr=0.3", "validation.interval=1", "checkpoint.interval=1")
    run = run_recipe(write_cloning(tmp_path), tmp_path / "run", *worse)
    step = run.weights_step
    assert step is not None
    assert step < run.state.step
    (result,) = (tmp_path / "run" / "evaluations").glob("held_out_step_*.json")
    assert result.name == f"held_out_step_{step:08d}.json"
    assert json.loads(result.read_text())["checkpoint"] == f"run step {step}"
