"""A function of the user's own is called in a process that ends where the function does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from rlinf.agents.function_process import FunctionProcess
from rlinf.agents.function_tool import FunctionToolConfig
from rlinf.agents.tool import ToolError
from rlinf.agents.tool_calls import ToolCalls
from rlinf.errors import ConfigError, RunFailure

TOOLS = """
import os, re, time
from rlinf.agents.tool import ToolError

calls = 0

def odd(word, *, mark="!"):
    global calls
    calls += 1
    print("called with", ascii(word))
    if word == "pattern":  # lets no other thread run
        return str(re.match(r"(a+)+$", "a" * 60 + "b"))
    if word == "exit":
        os._exit(3)
    if word == "raise":
        raise KeyError(word)
    if word == "refuse":
        raise ToolError("not " + word)
    if word == "number":
        return 7
    if word == "fork" and os.fork() == 0:
        return "child"
    if word == "wait":
        time.sleep(0.5)
    return f"{word}{mark}{calls}"

def broken(word):
    return word
"""


@pytest.fixture
def config(tmp_path: Path) -> FunctionToolConfig:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS, encoding="utf-8")
    return FunctionToolConfig(function=f"{file}:odd", options={"mark": "?"})


@pytest.fixture
def calls(config: FunctionToolConfig) -> Iterator[ToolCalls]:
    found = ToolCalls("odd", partial(FunctionProcess, config, by_names=False), seconds=2)
    yield found
    found.close()


def test_a_function_that_lets_no_thread_run_costs_its_limit(
    calls: ToolCalls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ToolError, match=r"^the tool failed$"):
        calls.call("pattern")
    assert "odd failed at 'pattern': no answer within 2 s" in caplog.text
    assert "called with 'pattern'" in caplog.text
    assert "tools.py" in caplog.text  # where it is
    assert calls.call("a") == "a?1"


def test_what_a_function_does_is_told_and_the_next_call_is_answered(
    calls: ToolCalls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert [calls.call(word) for word in ("a", "\ud83d", "fork")] == [
            "a?1",
            "\ud83d?2",
            "fork?3",
        ]
    assert "printed: called with 'a'" in caplog.text
    with pytest.raises(ToolError, match=r"^not refuse$"):
        calls.call("refuse")
    assert calls.failures == 0
    with caplog.at_level(logging.WARNING):
        for word in ("raise", "number", "exit"):
            with pytest.raises(ToolError, match=r"^the tool failed$"):
                calls.call(word)
    assert "odd failed at 'raise': KeyError: 'raise' (" in caplog.text
    assert calls.failures == 3
    assert calls.call("b") == "b?1"


def test_calls_at_the_same_time_have_a_process_each(calls: ToolCalls) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(calls.call, ["wait", "wait"])) == ["wait?1", "wait?1"]


def test_values_by_names_are_what_the_model_wrote(config: FunctionToolConfig) -> None:
    caller = FunctionProcess(config, by_names=True)
    try:
        assert caller.reply({"word": {"__array__": 0}}, 10) == "{'__array__': 0}?1"
        assert str(caller.reply({"words": 1}, 10)) == "missing a required argument: 'word'"
    finally:
        caller.close()


def test_a_function_that_cannot_be_called_is_refused_at_once(
    config: FunctionToolConfig, tmp_path: Path
) -> None:
    def begun(name: str) -> ToolCalls:
        other = FunctionToolConfig(function=f"{tmp_path}/tools.py:{name}", options={"mark": "?"})
        return ToolCalls(name, partial(FunctionProcess, other, by_names=False), seconds=1)

    with pytest.raises(ConfigError, match=r"broken.* cannot be called as broken") as refused:
        begun("broken")
    assert refused.value.key == "function"
    (tmp_path / "tools.py").write_text("import os\nos._exit(3)\ndef odd(word, mark): ...\n")
    with pytest.raises(RunFailure, match=r"tools\.py:odd: it ended with exit code 3"):
        begun("odd")
