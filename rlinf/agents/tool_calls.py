"""Calls of a tool that is not trusted to end, or to reply with a text."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from rlinf.agents.tool import Tool, ToolError
from rlinf.errors import RunFailure, told

Arguments = str | Mapping[str, Any]
"""A text, or values by name."""

log = logging.getLogger(__name__)

_MOST_NEVER_ANSWERED = 8
"""Calls that a tool may fail before the first that it answers: it then never will."""
_MOST_ABANDONED = 8
"""Calls that may go on behind their limit; each is a thread that takes time from the others."""


class _Line:
    """A thread that takes calls of a tool, one after the other."""

    def __init__(self, name: str, tool: Tool) -> None:
        self.calls: queue.SimpleQueue[Arguments | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[object] = queue.SimpleQueue()
        parts = (tool, self.calls, self.replies)
        self.thread = threading.Thread(target=_serve, args=parts, name=f"tool {name}", daemon=True)
        self.thread.start()


class ToolCalls:
    """Calls one tool, in threads of its own, and counts what it fails to do; may itself be called
    from several threads.

    A failure is an exception other than ToolError, a reply that is no text, or none within the
    limit. The model is told that the tool failed, and the first failure is logged with its reason.

    Args:
        name: Under which the model calls it.
        tool: It.
        seconds: What a call may take.
    """

    def __init__(self, name: str, tool: Tool, *, seconds: float) -> None:
        self._name, self._tool, self._seconds = name, tool, seconds
        self._lock = threading.Lock()
        self._answered = False
        self._abandoned: list[threading.Thread] = []
        self._idle: list[_Line] = []
        self.failures = 0
        """Calls so far that failed."""

    def call(self, arguments: Arguments) -> str:
        """The reply of the tool.

        Raises:
            ToolError: For the model: it refuses the call, or failed.
            RunFailure: It failed again and again and has answered nothing yet, or too many calls
                do not come to an end.
        """
        reply = self._reply(arguments)
        if isinstance(reply, str | ToolError):
            self._answered = True
            if isinstance(reply, str):
                return reply
            raise reply
        with self._lock:
            self._note(reply, arguments)
        raise ToolError("the tool failed")

    def _reply(self, arguments: Arguments) -> object:
        """A text, what was raised, or something else that the tool returned."""
        with self._lock:
            line = self._idle.pop() if self._idle else _Line(self._name, self._tool)
        line.calls.put(arguments)
        try:
            reply = line.replies.get(timeout=self._seconds)
        except queue.Empty:
            line.calls.put(None)  # should it ever end
            with self._lock:
                self._abandoned = [each for each in self._abandoned if each.is_alive()]
                self._abandoned.append(line.thread)
            return TimeoutError(f"no reply within {self._seconds:g} s")
        with self._lock:
            self._idle.append(line)
        return reply

    def _note(self, reply: object, arguments: Arguments) -> None:
        """Count a failure; a RunFailure where there were too many."""
        self.failures += 1
        error = reply if isinstance(reply, BaseException) else None
        why = f"replied with no text: {reply!r:.500}" if error is None else told(error)
        text = f"the tool {self._name} failed at {arguments!r:.200}: {why}"
        if self.failures == 1:
            log.warning("%s; further failures are counted", text, exc_info=error)
        never = not self._answered and self.failures >= _MOST_NEVER_ANSWERED
        hanging = sum(each.is_alive() for each in self._abandoned)
        if never or hanging >= _MOST_ABANDONED:
            what = f"all of {self.failures} calls" if never else f"{hanging} calls that hang"
            raise RunFailure(f"{text} ({what})")

    def close(self) -> None:
        """End the threads."""
        while self._idle:
            self._idle.pop().calls.put(None)


def _serve(
    tool: Tool, calls: queue.SimpleQueue[Arguments | None], replies: queue.SimpleQueue[object]
) -> None:
    while (arguments := calls.get()) is not None:
        try:
            if isinstance(arguments, str):
                replies.put(tool.call(arguments))
            else:
                replies.put(tool.call_by_names(arguments))
        except BaseException as error:  # noqa: BLE001 - one call must not end the run
            replies.put(error)
