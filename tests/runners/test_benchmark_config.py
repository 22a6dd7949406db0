"""What the recipe of a benchmark refuses, and that its rates are told though the disk is full."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.data.prompts.benchmarks import BenchmarkConfig
from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.data.prompts.prompt_files import LoadingReport
from rlinf.data.text_evaluation import PromptOutcome, TextEvaluationResult, TextEvaluationSpec
from rlinf.errors import ConfigError, RunFailure
from rlinf.models import language
from rlinf.runners import benchmark, groups, reasoning_model
from rlinf.runners.benchmark import Benchmark, BenchmarkRunConfig
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


def test_a_penalty_that_an_engine_computes_otherwise_is_refused(tmp_path: Path) -> None:
    how = "rollout.sampling={repetition_penalty: 1.1, min_new_tokens: 2}"
    with pytest.raises(ConfigError, match=r"sampling\.repetition_penalty = 1\.1.*nearest: 1\.0"):
        read(tmp_path, "rollout.engine.type=sglang", how)
    assert read(tmp_path, "rollout.engine.type=hf", how).rollout.sampling.min_new_tokens == 2


def test_random_weights_are_not_evaluated(tmp_path: Path) -> None:
    engine = ("rollout.engine.type=vllm", "rollout.engine.load_format=dummy")
    with pytest.raises(ConfigError, match=r"load_format.*would evaluate random weights"):
        read(tmp_path, *engine)
    assert read(tmp_path, engine[0]).rollout.engine.type == "vllm"


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


def test_rates_are_told_though_there_is_no_room_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = TextEvaluationSpec.of(
        dataset(), samples=1, sampling={}, reward={"type": "math"}, threshold=1.0
    )
    outcome = PromptOutcome(
        prompt_id=0, correct=(True,), answers=None, lengths=(3,), truncated=(False,), valid=(True,)
    )
    result = TextEvaluationResult.of(spec, [outcome], "model")

    def full(self: object, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    def found(value: Any) -> Any:
        return lambda *_, **__: value

    monkeypatch.setattr(BenchmarkConfig, "build", found(dataset()))
    monkeypatch.setattr(TextEvaluationResult, "save", full)
    # Modules that are imported above: one that is imported now would keep what is in their place.
    for module, name, value in (
        (language, "load_tokenizer", None), (groups, "Groups", nullcontext()),
        (reasoning_model, "check_context", None), (benchmark, "benchmark_spec", spec),
        (benchmark, "answer_prompts", result),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, found(value))
    directory: Any = SimpleNamespace(evaluations=tmp_path, traces=tmp_path)
    with pytest.raises(RunFailure, match=r"the result is not written to .*: No space left") as told:
        Benchmark(read(tmp_path), tmp_path).evaluate_alone(directory)
    assert isinstance(told.value.__cause__, OSError)
    assert "pass@1 1.000" in capsys.readouterr().out


def dataset() -> PromptDataset:
    prompt = Prompt(prompt_id=0, text="1 + 1?", tokens=np.array([1]), answer=["2"])
    return PromptDataset((prompt,), LoadingReport(records=1, prompts=1))
