"""A tool that hangs, raises or returns no text costs the call, and is counted; a tool that never
answers ends the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlinf.agents.tool import ToolError
from rlinf.errors import RunFailure

from .support import calls_of


def refuse(arguments: str) -> str:
    raise ToolError(f"not {arguments}")


def answer_or(failure: Callable[[], Any]) -> Callable[[str], Any]:
    return lambda arguments: failure() if arguments == "fail" else arguments.upper()


def test_replies_and_refusals_are_passed_on() -> None:
    calls = calls_of("shout", str.upper, seconds=10)
    assert [calls.call(text) for text in ("a", "b")] == ["A", "B"]
    with pytest.raises(ToolError, match=r"^not x$"):
        calls_of("no", refuse, seconds=10).call("x")
    assert calls.failures == 0


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (lambda: {}["key"], "KeyError: 'key'"),
        (lambda: 7, "replied with no text: 7"),
        (lambda: exec("raise SystemExit(3)"), "SystemExit: 3"),
    ],
)
def test_a_failure_is_told_to_the_model_counted_and_logged_once(
    failure: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = calls_of("shout", answer_or(failure), seconds=10)
    assert calls.call("a") == "A"
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with pytest.raises(ToolError, match=r"^the tool failed$"):
                calls.call("fail")
    assert calls.call("b") == "B"
    assert calls.failures == 20
    (record,) = caplog.records
    assert f"the tool shout failed at 'fail': {reason}" in record.getMessage()


def test_a_call_that_hangs_costs_its_limit_and_the_next_is_answered() -> None:
    free = threading.Event()
    calls = calls_of("shout", answer_or(lambda: free.wait() and "late"), seconds=0.05)
    for number in range(7):
        with pytest.raises(ToolError, match=r"^the tool failed$"):
            calls.call("fail")
        assert calls.call(str(number)) == str(number)  # not the late reply
    with pytest.raises(RunFailure, match=r"no reply within 0\.05 s \(8 calls that hang\)"):
        calls.call("fail")
    free.set()


def test_calls_that_ended_late_do_not_count_as_hanging() -> None:
    ended = threading.Semaphore(0)

    def slow() -> str:
        time.sleep(0.1)
        ended.release()
        return "late"

    calls = calls_of("shout", answer_or(slow), seconds=0.05)
    for number in range(12):
        assert calls.call(str(number)) == str(number)
        with pytest.raises(ToolError, match=r"^the tool failed$"):
            calls.call("fail")
        assert ended.acquire(timeout=30)
        while any(thread.is_alive() for thread in calls._abandoned):
            time.sleep(0.01)


def test_a_tool_that_never_answered_ends_the_run() -> None:
    calls = calls_of("broken", lambda text: text.missing, seconds=10)  # type: ignore[attr-defined]
    for _ in range(7):
        with pytest.raises(ToolError):
            calls.call("x")
    with pytest.raises(
        RunFailure, match=r"the tool broken failed at 'x': AttributeError.*\(all of"
    ):
        calls.call("x")


def test_the_thread_ends_with_its_owner() -> None:
    calls = calls_of("brief", str.upper, seconds=10)
    calls.call("a")
    (thread,) = [each for each in threading.enumerate() if each.name == "tool brief"]
    calls.close()
    thread.join(10)
    assert not thread.is_alive()
