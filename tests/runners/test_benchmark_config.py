"""What the recipe of a benchmark refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.runners.benchmark import BenchmarkRunConfig
from rlinf.workers.config.answering import check_described

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


SEARCH = """
def search(query, *, most=3): ...

def anything(**named): ...
"""


def described(
    tmp_path: Path, function: str, name: str, *arguments: str, more: str = ""
) -> BenchmarkRunConfig:
    """With tools `find` and ``more``; the model is told of one, by its name and arguments."""
    (tmp_path / "tools.py").write_text(SEARCH)
    properties = ", ".join(f"{each}: {{type: string}}" for each in arguments)
    parameters = f"{{type: object, properties: {{{properties}}}}}"
    return read(
        tmp_path,
        "benchmark.apply_chat_template=true",
        "benchmark.chat_template_kwargs="
        f"{{tools: [{{type: function, function: {{name: {name}, parameters: {parameters}}}}}]}}",
        "rollout.agent={calls: chat_template, tools: {find: {type: function, function: "
        f"'{tmp_path}/tools.py:{function}', options: {{most: 2}}}}{more}}}}}",
    )


def test_the_model_is_told_of_the_tools_that_it_can_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of a tool `fnd` .*did you mean `find`\?"):
        described(tmp_path, "search", "fnd", "query")
    unknown = ", calc: {type: calculator}"
    with pytest.raises(ConfigError, match=r"agent\.tools\.calc.* benchmark\.chat_.* does not tell"):
        described(tmp_path, "search", "find", "query", more=unknown)


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("search", ("query",), ""),
        ("search", ("query", "most"), ""),
        ("anything", ("words",), ""),
        ("search", ("querry",), "'query'; did you mean `query`?"),
        ("search", ("query", "pages"), "an unexpected keyword argument 'pages'; known: query"),
        ("search", (), "of (nothing): missing a required argument: 'query'"),
    ],
)
def test_tools_can_be_called_with_the_arguments_that_the_model_is_told_of(
    tmp_path: Path, function: str, arguments: tuple[str, ...], problem: str
) -> None:
    config = described(tmp_path, function, "find", *arguments)
    if not problem:
        check_described(config.rollout.agent, config.benchmark)
        return
    with pytest.raises(ConfigError) as refused:
        check_described(config.rollout.agent, config.benchmark)
    assert refused.value.key == "rollout.agent.tools.find.function"
    assert problem in str(refused.value)
