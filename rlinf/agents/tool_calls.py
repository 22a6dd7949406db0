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


class ToolCalls:
    """Calls one tool, in a thread of its own, and counts what it fails to do.

    A failure is an exception other than ToolError, a reply that is no text, or none within the
    limit. The model is told that the tool failed, and the first failure is logged with its reason.

    Args:
        name: Under which the model calls it.
        tool: It.
        seconds: What a call may take.
    """

    def __init__(self, name: str, tool: Tool, *, seconds: float) -> None:
        self._name, self._tool, self._seconds = name, tool, seconds
        self._answered = False
        self._abandoned = 0
        self._calls: queue.SimpleQueue[Arguments | None] | None = None
        self._replies: queue.SimpleQueue[object]
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
        self._note(reply, arguments)
        raise ToolError("the tool failed")

    def _reply(self, arguments: Arguments) -> object:
        """A text, what was raised, or something else that the tool returned."""
        if self._calls is None:
            self._calls, self._replies = queue.SimpleQueue(), queue.SimpleQueue()
            parts = (self._tool, self._calls, self._replies)
            name = f"tool {self._name}"
            threading.Thread(target=_serve, args=parts, name=name, daemon=True).start()
        self._calls.put(arguments)
        try:
            return self._replies.get(timeout=self._seconds)
        except queue.Empty:
            self._calls.put(None)  # should it ever end
            self._calls, self._abandoned = None, self._abandoned + 1
            return TimeoutError(f"no reply within {self._seconds:g} s")

    def _note(self, reply: object, arguments: Arguments) -> None:
        """Count a failure; a RunFailure where there were too many."""
        self.failures += 1
        error = reply if isinstance(reply, BaseException) else None
        why = f"replied with no text: {reply!r:.500}" if error is None else told(error)
        text = f"the tool {self._name} failed at {arguments!r:.200}: {why}"
        if self.failures == 1:
            log.warning("%s; further failures are counted", text, exc_info=error)
        never = not self._answered and self.failures >= _MOST_NEVER_ANSWERED
        if never or self._abandoned >= _MOST_ABANDONED:
            what = (
                f"all of {self.failures} calls" if never else f"{self._abandoned} calls that hang"
            )
            raise RunFailure(f"{text} ({what})")

    def close(self) -> None:
        """End the thread."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


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
