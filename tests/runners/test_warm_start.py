"""The supervised steps before the first step of a reasoning run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from safetensors.numpy import load_file

from rlinf.algorithms.batch import Batch
from rlinf.cli.main import main
from rlinf.models.language import load_tokenizer
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.language_trainers import text_batch
from rlinf.workers import source

from .reasoning_support import small_config, train, write_recipe

ONE = ("runner.total_steps=1", "warm_start.steps=20")


def taught(run: Path) -> dict[str, np.ndarray]:
    """Weights that the first step began with."""
    return load_file(run / "initial_model" / "model.safetensors")


def test_the_loss_falls_and_where_it_is_taught_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "one", *ONE)
    said = re.search(r"loss ([\d.]+) to ([\d.]+)", capsys.readouterr().out)
    assert said is not None
    assert float(said[2]) < 0.7 * float(said[1])
    assert {path.name for path in run.iterdir() if path.name.startswith(".initial")} == set()
    place = "cluster.component_placement={'rollout,reward': '0', actor: '1'}"
    other = train(tmp_path / "two", *ONE, place, "cluster.cpu_devices_per_node=2")
    for name, value in taught(run).items():
        assert np.array_equal(taught(other)[name], value), name


def test_prompts_are_taught_as_they_are_given_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught_texts: list[tuple[list[int], list[int]]] = []

    def noted(texts: list[tuple[list[int], list[int]]], *more: Any) -> Batch:
        taught_texts.extend(texts)
        return text_batch(texts, *more)

    monkeypatch.setattr(source, "text_batch", noted)
    written = ("data.apply_chat_template=true", "data.max_prompt_length=24")
    run = train(tmp_path, *ONE, *written)
    tokenizer = load_tokenizer(LanguageModelConfig(path=run / "initial_model"))
    given = small_config(tmp_path, *written).data.build(tokenizer).train
    assert [prompt for prompt, _ in taught_texts] == [each.tokens.tolist() for each in given]


def test_what_is_taught_has_float32_weights(tmp_path: Path) -> None:
    weights = taught(train(tmp_path, *ONE, "actor.precision.param=bfloat16"))
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float32)}
    assert any((value.view(np.uint32) & 0xFFFF).any() for value in weights.values())


def test_a_loss_that_is_not_finite_names_the_rate_to_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run")]
    huge = ["warm_start.optim.lr=1.0e+38", "warm_start.max_skipped_updates=1"]
    assert main([*words, *ONE, *huge]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"2 updates in a row.*lower warm_start\.optim\.lr", told)
    assert not (tmp_path / "run" / "initial_model").exists()


def test_an_adapter_that_the_model_cannot_have_is_refused_before_it_is_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run")]
    assert main([*words, "actor.lora={target_modules: [q_prj]}"]) != 0
    told = capsys.readouterr()
    assert "the model has no linear layer q_prj; legal: down_proj" in " ".join(told.err.split())
    assert "warm start took" not in told.out
    assert not (tmp_path / "run" / "initial_model").exists()


@pytest.mark.parametrize(
    ("body", "told"),
    [("None", "it returned None, a NoneType, not a number"), ("sample.answers", "AttributeError")],
)
def test_a_reward_that_gives_no_number_for_right_answers_is_refused_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, told: str
) -> None:
    (tmp_path / "own.py").write_text(f"def score(sample):\n    return {body}\n")
    words = ["train", str(write_recipe(tmp_path)), "--run-dir", str(tmp_path / "run")]
    own = f"reward.functions={{own: {{type: function, function: {tmp_path}/own.py:score}}}}"
    assert main([*words, *ONE, own, "validation.correct_by=own"]) == 2
    shown = capsys.readouterr()
    expected = f"no right answer of the task could be scored; the first: .*{told}"
    assert re.search(expected, " ".join(shown.err.split()))
    assert "warm start" not in shown.out
    assert not (tmp_path / "run").exists()
