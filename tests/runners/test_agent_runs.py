"""Runs whose answers call a tool: the same under any placement, and after an interruption."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.agents.calculator import Calculator
from rlinf.errors import ConfigError, UserError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.run_origin import Origin
from rlinf.runners.evaluation import evaluate
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.run import Run

from .reasoning_support import CALLING, assert_equal_runs, small_config, train, untimed
from .test_reasoning import PLACEMENTS, StopAfter, needs_two_cores


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("calling"), *CALLING)


def test_answers_have_turns(reference: Path) -> None:
    lines = untimed(reference)[1:]
    assert all(1 < line["rollout/turns"] <= 3 for line in lines)
    assert all(line["actor/optimizer_steps"] == 2 for line in lines)
    evaluated = [line["eval/turns"] for line in untimed(reference) if "eval/success" in line]
    assert len(evaluated) == 3
    assert all(1 < turns <= 3 for turns in evaluated[1:])


def test_a_function_of_ones_own_is_a_tool(
    reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text(
        "from rlinf.agents.calculator import Calculator, CalculatorConfig\n"
        "def calc(arguments, *, decimals):\n"
        "    return Calculator(CalculatorConfig(decimals=decimals)).call(arguments)\n"
    )
    tool = f"{{type: function, function: '{file}:calc', options: {{decimals: 6}}, " + (
        f"alphabet: '{Calculator.alphabet}'}}")  # fmt: skip
    # When a tool replies changes no bit.
    words = (*CALLING, f"rollout.agent.tools={{calc: {tool}}}", "rollout.agent.max_calls_at_once=8")
    run = train(tmp_path, *words)
    assert_equal_runs(reference, run)
    # It is evaluated with what the file holds then, which is told.
    Origin.of(small_config(tmp_path, *words)).save(run)
    caplog.clear()
    evaluate(Reasoning, run)
    assert not caplog.records
    file.write_text(f"{file.read_text()}# mended\n")
    evaluate(Reasoning, run)
    assert "my_tools.py is not what the run began with" in caplog.text
    file.unlink()
    with pytest.raises(
        ConfigError, match=r"say where it is: rollout\.agent\.tools\.calc\.function="
    ):
        evaluate(Reasoning, run)


def test_failures_of_tools_in_an_evaluation_are_told(
    reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text("def calc(a):\n    return '7' if len(a) % 2 else 7\n")
    tool = f"{{calc: {{type: function, function: '{file}:calc'}}}}"
    with caplog.at_level(logging.WARNING):
        train(
            tmp_path, *CALLING, f"rollout.agent.tools={tool}", "runner.total_steps=1",
            f"model.path={reference}/model", "model.architecture=null", "warm_start=null",
        )  # fmt: skip
    assert "calls of the evaluation were answered by no tool, as it failed" in caplog.text


def test_a_function_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tool = "{type: function, function: 'nowhere.py:calc'}"
    config = small_config(tmp_path, *CALLING, f"rollout.agent.tools={{calc: {tool}}}")
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py in") as refused:
        config.check()
    assert refused.value.key == "rollout.agent.tools.calc.function"


def test_the_same_model_without_the_tool(tmp_path: Path) -> None:
    run = train(tmp_path, *CALLING, "rollout.agent=null", "data.task.calls=null")
    assert "rollout/turns" not in untimed(run)[1]
    with pytest.raises(UserError, match=r"data\.task\.calls"):
        small_config(tmp_path, *CALLING, "rollout.agent=null")


def test_calls_by_the_chat_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    by_template = (
        *CALLING[:-2], "data.task.calls=null", "rollout.agent.calls=chat_template",
        "data.max_prompt_length=32", "model.architecture.max_position_embeddings=64",
    )  # fmt: skip
    written = ("data.apply_chat_template=true", f"data.chat_template={template}")
    with pytest.raises(UserError, match=r"prompts are not in the chat template"):
        small_config(tmp_path, *by_template, "warm_start=null")
    with pytest.raises(UserError, match=r"what a warm start learns calls by tags"):
        small_config(tmp_path, *by_template, *written)
    run = train(tmp_path, *by_template, *written, "warm_start=null", "runner.total_steps=1")
    assert untimed(run)[1]["rollout/turns"] >= 1
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"writes no messages of the role `tool`"):
        train(tmp_path / "other", *by_template, *written, "warm_start=null")


@needs_two_cores
@pytest.mark.parametrize(
    "placement", ["disaggregated", pytest.param("two engines", marks=pytest.mark.slow)]
)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    run = train(
        tmp_path,
        *CALLING,
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS[placement]}",
    )
    assert_equal_runs(reference, run)


def _cut_and_resumed(directory: Path, *overrides: str) -> Path:
    run = train(directory, *overrides, stop=StopAfter(2))
    assert len(untimed(run)) < 5
    with RunDirectory.open(run) as opened:
        Run(Reasoning, small_config(directory, *overrides), opened, threading.Event()).run(
            resume=True
        )
    return run


def test_interrupted_and_resumed(reference: Path, tmp_path: Path) -> None:
    assert_equal_runs(reference, _cut_and_resumed(tmp_path, *CALLING))


@pytest.mark.slow
def test_conversations_that_are_carried_from_step_to_step(tmp_path: Path) -> None:
    carried = (*CALLING, "rollout.partial={oversample: 1.5, schedule: longest_first}",
               "rollout.engine.max_running_requests=10")  # fmt: skip
    whole = train(tmp_path / "whole", *carried)
    lines = untimed(whole)[1:]
    assert max(line["rollout/interrupted"] for line in lines) >= 1
    assert max(line["rollout/staleness_max"] for line in lines) >= 1
    assert_equal_runs(whole, _cut_and_resumed(tmp_path / "cut", *carried))


def test_evaluation_of_a_run_repeats_its_last_one(reference: Path) -> None:
    result = evaluate(Reasoning, reference)
    assert result.estimate("pass@1").value == untimed(reference)[-1]["eval/success"]
    validation = json.loads((reference / "evaluations/validation_step_00000004.json").read_text())
    # The model's own tokens: a call and an answer, without what the tool replied.
    assert max(max(outcome["lengths"]) for outcome in validation["outcomes"]) <= 30
