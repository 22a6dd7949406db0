"""Published benchmarks end to end: files in the forms of their publishers, a model, the rates."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.load import recipe_names
from rlinf.data.text_evaluation import TextEvaluationResult, TextEvaluationSpec

from .conftest import rlinf, write_model

CHOICES = {
    "Correct Answer": "two",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "three",
    "Incorrect Answer 3": "five",
}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "aime24": [
        {"id": 60, "problem": "Find 1+1.", "solution": "s", "answer": "2", "year": "2024"},
        {"id": 61, "problem": "Find 2+2.", "solution": "s", "answer": "4", "year": "2024"},
    ],
    "aime25": [{"question": "Find 5*5.", "answer": "25"}],
    "math500": [
        {"problem": "Half?", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2},
        {"problem": "Third?", "answer": "\\frac{1}{3}", "subject": "Algebra", "level": 5},
    ],
    "gpqa_diamond": [
        {"Record ID": "r1", "Question": "Which is even?", **CHOICES},
        {"Record ID": "r2", "Question": "Which is it again?", **CHOICES},
    ],
}
NAMES = [name for name in recipe_names() if name.startswith("evaluation/")]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """One tiny file of each form."""
    found = {}
    for name, records in RECORDS.items():
        suffix = "csv" if name == "gpqa_diamond" else "jsonl"
        found[name] = path = tmp_path / f"{name}.{suffix}"
        with path.open("w", newline="") as file:
            if suffix == "csv":
                writer = csv.DictWriter(file, list(records[0]))
                writer.writeheader()
                writer.writerows(records)
            else:
                file.writelines(f"{json.dumps(record)}\n" for record in records)
    return found


def words(name: str, files: dict[str, Path], model: Path, output: Path) -> list[str]:
    return [
        f"evaluation/{name}",
        f"benchmark.path={files[name]}",
        f"model.path={model}",
        "model.dtype=float32",
        f"runner.output_dir={output}",
    ]


def test_every_recipe_is_looked_at() -> None:
    assert {f"evaluation/{name}" for name in RECORDS} == set(NAMES)


@pytest.mark.parametrize("name", RECORDS)
def test_a_dry_run(
    name: str,
    files: dict[str, Path],
    models: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown, error = rlinf(
        capsys, "eval", *words(name, files, models("qwen2"), tmp_path), "--dry-run"
    )
    assert code == 0, error
    assert "nothing was started" in shown
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "name", ["gpqa_diamond", *(pytest.param(n, marks=pytest.mark.slow) for n in
                               ("aime24", "aime25", "math500"))]
)  # fmt: skip
@pytest.mark.timeout(180)
def test_rates_of_a_model(
    name: str,
    files: dict[str, Path],
    models: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown, error = rlinf(
        capsys,
        "eval",
        *words(name, files, models("qwen2"), tmp_path),
        "benchmark.apply_chat_template=false",
        "rollout.samples=4",
        "rollout.sampling.max_new_tokens=8",
        "reward.processes=1",
    )
    assert code == 0, error
    for metric in ("pass@1", "pass@2", "pass@4", "mean@4"):
        assert f"  {metric} 0." in shown
    (run,) = (path for path in (tmp_path / name).iterdir() if path.name != "latest")
    result = TextEvaluationResult.load(run / "evaluations" / "result.json")
    spec = TextEvaluationSpec.load(run / "evaluations" / "spec.json")
    assert result.spec_sha256 == spec.sha256
    assert spec.answers == ("letter" if name == "gpqa_diamond" else "math")
    assert len(result.outcomes) == len(RECORDS[name])
    assert all(len(outcome.answers or ()) == 4 for outcome in result.outcomes)
    voted = any(answer for outcome in result.outcomes for answer in outcome.answers or ())
    assert ("  maj@4 0." in shown) == voted  # a model that knows nothing writes no box
    assert result.n_invalid == 0
    if name == "math500":
        assert {outcome.level for outcome in result.outcomes} == {2, 5}
    refused, _, error = rlinf(capsys, "eval", str(run))
    assert (refused, "rlinf eval RECIPE" in error) == (2, True)


def test_a_model_with_tools(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    marks = ("<calc>", "</calc>", "<result>", "</result>")
    model = write_model("qwen2", tmp_path / "model", marks=marks)
    code, _, error = rlinf(
        capsys,
        "eval",
        *words("math500", files, model, tmp_path),
        "benchmark.apply_chat_template=false",
        "rollout.agent={tools: {calc: {type: calculator}}, max_reply_tokens: 9}",
        "rollout.sampling.max_new_tokens=128",
        "reward.processes=1",
    )
    assert code == 0, error
    (run,) = (path for path in (tmp_path / "math500").iterdir() if path.name != "latest")
    result = TextEvaluationResult.load(run / "evaluations" / "result.json")
    said = [text for outcome in result.outcomes for text in outcome.texts or ()]
    # Weights that were drawn say a mark now and then, and are told what is wrong with it.
    assert any("</calc><result>error: ca</result>" in text for text in said)


REFUSED = [
    (["evaluation/aime24", "--episodes", "3"], ["--episodes", "has no effect on a recipe"]),
    (["evaluation/aime24", "--token", "x"], ["--token has no effect on a recipe"]),
    (["evaluation/aime42"], ["no run 'evaluation/aime42'", "mean the recipe `evaluation/aime2"]),
    (["evaluation/aime42", "--dry-run"], ["mean the recipe `evaluation/aime2"]),
    (["quickstart"], ["begins with random weights", "nearest: model.path", "rlinf train quicks"]),
    (["quickstart", "--compare", "other"], ["--compare has no effect on a recipe"]),
    (["sft/arithmetic"], ["sft/arithmetic is not evaluated", "eval evaluation/math500"]),
    (["reasoning/arithmetic_grpo"], ["begins with random weights"]),
    (["quickstart", "--token", "x"], ["--token has no effect without --server"]),
    (["quickstart", "--spec", "none.json"], ["--spec: no file 'none.json'"]),
    (["quickstart", "model.path=none"], ["model.path", "there is no file none"]),
    (["evaluation/aime24", "benchmark.format=aime26"], ["did you mean `aime2"]),
    (["evaluation/aime24"], ["benchmark.path", "there is no file data/aime24.jsonl"]),
    (
        ["evaluation/aime24", "rollout.sampling={greedy: true, temperature: 1.0, top_p: 1.0}"],
        ["rollout.samples = 32", "all the same"],
    ),
    (["evaluation/aime24", "model.lora={rank: 4}"], ["model.lora", "has no effect"]),
]


@pytest.mark.parametrize(("given", "parts"), REFUSED)
def test_refused(
    given: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where somebody has trained already, a name may be that of a run.
    monkeypatch.chdir(tmp_path)
    code, _, error = rlinf(capsys, "eval", *given)
    assert code == 2, error
    flat = " ".join(error.split())
    assert [part for part in parts if part not in flat] == []


def test_an_evaluation_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = rlinf(capsys, "train", "evaluation/aime24", "--dry-run")
    assert code == 2
    assert "trains none; use: rlinf eval" in error
