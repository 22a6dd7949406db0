"""A run goes on with the files that it began with, wherever they are, or says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from rlinf.cli.main import main
from tests.runners.supervised_support import write_cloning, write_fine_tuning

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of runs with one that left a model behind."""
    directory = tmp_path_factory.mktemp("base")
    words = ["runner.total_steps=1", f"runner.output_dir={directory}"]
    assert main(["train", str(write_fine_tuning(directory)), *words]) == 0
    return directory / "sft"


def adapted(base: Path) -> Path:
    """A run of adapters on ``latest`` of the same directory of runs, given by a relative path."""
    recipe = base.parent / "sft.yaml"
    words = ["~model", "model.path=sft/latest/model", "actor.lora.rank=2", "runner.total_steps=1"]
    assert main(["train", str(recipe), *words, "runner.output_dir=."]) == 0
    return (base / "latest").resolve()


def test_adapters_go_on_with_their_own_base_alone(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    first = (base / "latest").resolve()
    run = adapted(base)
    written = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert written["model"]["path"] == str(first / "model")

    monkeypatch.chdir(tmp_path)
    longer = ["resume", str(run), "runner.total_steps=2"]
    assert main(longer) == 0

    weights = first / "model" / "model.safetensors"
    before = weights.read_bytes()
    changed = {name: array + np.float32(1e-3) for name, array in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    capsys.readouterr()
    assert main([*longer[:-1], "runner.total_steps=3"]) == 2
    assert (
        f"model.path: {first / 'model'} is not what the run began with: model.safetensors differs"
        in capsys.readouterr().err
    )
    weights.write_bytes(before)

    elsewhere = tmp_path / "moved"
    (first / "model").rename(elsewhere)
    assert main([*longer[:-1], "runner.total_steps=3"]) == 2
    assert "If it was moved, say where it is: model.path=PATH" in capsys.readouterr().err
    assert main([*longer[:-1], "runner.total_steps=3", f"model.path={elsewhere}"]) == 0
    assert main([*longer[:-1], "runner.total_steps=4"]) == 0  # it is remembered
    elsewhere.rename(first / "model")


@pytest.mark.parametrize("task", ["reasoning", "sft"])
def test_a_language_model_is_always_written_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, task: str
) -> None:
    (tmp_path / "config.yaml").write_text(f"task: {task}\n", encoding="utf-8")
    out = tmp_path / "out"
    assert main(["convert", "run", str(tmp_path), "--whole", "--out", str(out)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--whole has no effect on a language model" in error
    assert not out.exists()


def test_an_edited_configuration_is_compared_with_what_the_run_began_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, recipe = tmp_path / "run", write_cloning(tmp_path)
    assert main(["train", str(recipe), "--run-dir", str(run), "runner.total_steps=1"]) == 0
    file = run / "config.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("lr: 0.01", "lr: 0.5"), encoding="utf-8")
    for words in (["resume", str(run)], ["eval", str(run)]):
        capsys.readouterr()
        assert main(words) == 2
        assert "not changeable: actor.optim.lr = 0.5 (it was 0.01)" in capsys.readouterr().err
    file.write_text(text.replace("total_steps: 1", "total_steps: 2"), encoding="utf-8")
    assert main(["resume", str(run)]) == 0
    assert json.loads((run / "origin.json").read_bytes())["config"]["runner"]["total_steps"] == 2
    assert main(["resume", str(run), f"runner.output_dir={tmp_path}/elsewhere"]) == 2
    assert f"stays in its directory, {run}; to go on elsewhere" in capsys.readouterr().err


def test_episodes_may_be_moved_and_not_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, recipe = tmp_path / "run", write_cloning(tmp_path)
    assert main(["train", str(recipe), "--run-dir", str(run), "runner.total_steps=1"]) == 0
    elsewhere = tmp_path / "moved"
    (tmp_path / "episodes").rename(elsewhere)
    words = ["resume", str(run), "runner.total_steps=2", f"data.path={elsewhere}"]
    assert main(words) == 0
    added = elsewhere / "more.json"
    added.write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert main(words) == 2
    assert "data.path: " in (message := capsys.readouterr().err)
    assert "more.json is new" in message


def test_a_policy_is_evaluated_where_the_episodes_it_learnt_from_are_gone(tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", write_cloning(tmp_path)
    assert main(["train", str(recipe), "--run-dir", str(run), "runner.total_steps=1"]) == 0
    (tmp_path / "episodes").rename(tmp_path / "moved")
    assert main(["eval", str(run), "evaluation.episodes=2", "evaluation.seed=9"]) == 0
    assert main(["eval", str(run), "--episodes", "2"]) == 0


def test_a_language_model_is_evaluated_where_the_prompts_of_the_training_are_gone(
    base: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"{n}=", "solutions": str(n)}) + "\n" for n in range(10, 18)]
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text("".join(lines), encoding="utf-8")
    held_out.write_text(lines[0].replace("10", "19"), encoding="utf-8")
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(
        yaml.safe_dump(
            {
                "task": "reasoning",
                "runner": {"total_steps": 1},
                "data": {"files": {"train": [str(train)], "validation": [str(held_out)]}},
                "model": {"path": str(base / "latest" / "model")},
                "rollout": {
                    "prompts": 2,
                    "group_size": 2,
                    "sampling": {"max_new_tokens": 2},
                    "engine": {"type": "hf"},
                },
                "reward": {"functions": {"answer": {"type": "exact_match"}}},
                "algorithm": {"type": "grpo"},
                "actor": {"type": "fsdp", "optim": {"lr": 1e-5}},
                "validation": {"prompts": 1, "val_check_interval": 0},
            }
        ),
        encoding="utf-8",
    )
    assert main(["train", str(recipe), "--run-dir", str(run)]) == 0
    train.unlink()
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    assert "training:" not in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text("".join(lines[:3]), encoding="utf-8")
    words = ["eval", str(run), f"data.files.validation=[{other}]"]
    assert main([*words, "validation.prompts=3"]) == 0
    assert "n = 1" in capsys.readouterr().out

    assert main(["resume", str(run), "runner.total_steps=2"]) == 2
    assert f"{train}" in capsys.readouterr().err


def test_an_option_may_begin_at_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells expand `~` at the start of a word, and not behind `=`."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["record", "quickstart", "--episodes", "1", "--num-envs", "1", "--out=~/demo"]
    assert main(words) == 0
    assert (tmp_path / "demo" / "frames.safetensors").is_file()
    assert list((tmp_path / "work").iterdir()) == []
    capsys.readouterr()
    assert main(["eval", "~nobody-has-this-name/run"]) == 2
    assert "a path begins with ~NAME, and there is no user NAME" in capsys.readouterr().err
