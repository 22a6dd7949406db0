"""What the recipe of a benchmark refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.runners.benchmark import BenchmarkRunConfig

RECIPE = """
task: benchmark
benchmark: {format: aime24, path: questions.jsonl}
model: {path: model}
reward: {processes: 1, functions: {answer: {type: math}}}
"""


def read(directory: Path, *overrides: str) -> BenchmarkRunConfig:
    path = directory / "benchmark.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(str(path), list(overrides))
    return validate(BenchmarkRunConfig, recipe.data, recipe)


def test_what_says_nothing_is_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, "checkpoint={}", "runner.timeline=false").rollout.samples == 1


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("checkpoint.interval=5", "checkpoint"),
        ("logger.backends=[]", "logger"),
        ("cluster.plan=auto", r"cluster\.plan"),
        ("runner.timeline=true", r"runner\.timeline"),
    ],
)
def test_sections_without_effect_are_refused(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*no effect on an evaluation"):
        read(tmp_path, override)
