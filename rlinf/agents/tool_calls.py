"""Calls of a tool that is not trusted to end, or to reply with a text."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Failure:
    """What a tool did instead of replying with a text."""

    why: str
    """In a line."""
    trace: str = ""
    """Where."""


Reply = str | ToolError | Failure
"""What becomes of a call."""


def called(tool: Tool, arguments: Arguments) -> Reply:
    """Call a tool, whatever it does."""
    try:
        reply: object = (
            tool.call(arguments) if isinstance(arguments, str) else tool.call_by_names(arguments)
        )
        if isinstance(reply, str):
            return reply
        return Failure(f"replied with no text: {reply!r:.500}")
    except ToolError as refusal:
        return refusal
    except BaseException as error:  # noqa: BLE001 - one call must not end the run
        return Failure(told(error), "".join(traceback.format_exception(error)))


class Caller(ABC):
    """Makes calls of a tool, one after the other."""

    abandoned: threading.Thread | None = None
    """What goes on with a call behind its limit; no others are then made here."""

    def start(self) -> None:
        """Wait until a call can be made; UserError or RunFailure where none ever can."""

    @abstractmethod
    def reply(self, arguments: Arguments, seconds: float) -> Reply:
        """Make a call that may take so long."""

    @abstractmethod
    def close(self) -> None:
        """Let it go; no call is under way."""


class ThreadCaller(Caller):
    """Calls a tool in a thread of its own.

    A call that lets no other thread run, as a long search of a pattern does, has no limit here.
    """

    def __init__(self, name: str, tool: Tool) -> None:
        self._calls: queue.SimpleQueue[Arguments | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        parts = (tool, self._calls, self._replies)
        self._thread = threading.Thread(target=_serve, args=parts, name=f"tool {name}", daemon=True)
        self._thread.start()

    def reply(self, arguments: Arguments, seconds: float) -> Reply:
        """See :meth:`Caller.reply`."""
        self._calls.put(arguments)
        try:
            return self._replies.get(timeout=seconds)
        except queue.Empty:
            self.close()  # should the call ever end
            self.abandoned = self._thread
            return Failure(f"no reply within {seconds:g} s")

    def close(self) -> None:
        """See :meth:`Caller.close`."""
        self._calls.put(None)


def _serve(
    tool: Tool, calls: queue.SimpleQueue[Arguments | None], replies: queue.SimpleQueue[Reply]
) -> None:
    while (arguments := calls.get()) is not None:
        replies.put(called(tool, arguments))


class ToolCalls:
    """Calls one tool, and counts what it fails to do; may itself be called from several threads.

    A failure is an exception other than ToolError, a reply that is no text, or none within the
    limit. The model is told that the tool failed, and the first failure is logged with its reason.

    Args:
        name: Under which the model calls it.
        begin: Begins what makes calls; there are as many as there were calls at the same time.
        seconds: What a call may take.

    Raises:
        UserError: No call can be made.
        RunFailure: So too.
    """

    def __init__(self, name: str, begin: Callable[[], Caller], *, seconds: float) -> None:
        self._name, self._begin, self._seconds = name, begin, seconds
        self._lock = threading.Lock()
        self._answered = self._closed = False
        self._abandoned: list[threading.Thread] = []
        self._idle = [begin()]
        self._idle[0].start()
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
        if isinstance(reply, Failure):
            with self._lock:
                self._note(reply, arguments)
            raise ToolError("the tool failed")
        self._answered = True
        if isinstance(reply, str):
            return reply
        raise reply

    def _reply(self, arguments: Arguments) -> Reply:
        with self._lock:
            caller = self._idle.pop() if self._idle else self._begin()
        reply = caller.reply(arguments, self._seconds)
        with self._lock:
            if caller.abandoned is None:
                self._idle.append(caller)
                if self._closed:
                    self._end()
            else:
                going_on = [each for each in self._abandoned if each.is_alive()]
                self._abandoned = [*going_on, caller.abandoned]
        return reply

    def _note(self, failure: Failure, arguments: Arguments) -> None:
        """Count a failure; a RunFailure where there were too many."""
        self.failures += 1
        text = f"the tool {self._name} failed at {arguments!r:.200}: {failure.why}"
        if self.failures == 1:
            trace = f"\n{failure.trace}".rstrip()
            log.warning("%s; further failures are counted%s", text, trace)
        never = not self._answered and self.failures >= _MOST_NEVER_ANSWERED
        hanging = sum(each.is_alive() for each in self._abandoned)
        if never or hanging >= _MOST_ABANDONED:
            what = f"all of {self.failures} calls" if never else f"{hanging} calls that hang"
            raise RunFailure(f"{text} ({what})")

    def close(self) -> None:
        """End what makes the calls, at the end of each."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        while self._idle:
            self._idle.pop().close()
