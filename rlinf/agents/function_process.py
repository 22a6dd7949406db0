"""A process that calls a function of the user's own, and can be ended whatever that does."""

from __future__ import annotations

import json
from typing import Any

from rlinf.agents.function_tool import FunctionTool, FunctionToolConfig
from rlinf.agents.tool import ToolError
from rlinf.agents.tool_calls import Arguments, Caller, Failure, Reply, called
from rlinf.errors import RunFailure
from rlinf.processes.child import ProcessLostError, SupervisedProcess, serve

_START_SECONDS = 600.0
"""What the imports of a file may take, which may read much."""


class FunctionProcess(Caller):
    """Calls a function in a process of its own, which begins at once, and is replaced where a call
    takes too long or ends it.

    Args:
        config: The function.
        by_names: Whether calls have values by names.
    """

    def __init__(self, config: FunctionToolConfig, *, by_names: bool) -> None:
        self._function = config.function
        self._settings = {"config": config.model_dump(mode="json"), "by_names": by_names}
        self._begin()

    def _begin(self) -> None:
        # With as many threads as the worker: it may search in what it has read.
        self._process = SupervisedProcess(
            "rlinf.agents.function_process", self._settings, environment={}
        )
        self._ready = False

    def start(self) -> None:
        """See :meth:`Caller.start`."""
        if self._ready:
            return
        try:
            self._process.receive(_START_SECONDS)
        except ProcessLostError as lost:
            self._process.kill()
            raise RunFailure(f"the process that calls {self._function}: {lost.detail}") from lost
        except BaseException:
            self._process.kill()
            raise
        self._ready = True

    def reply(self, arguments: Arguments, seconds: float) -> Reply:
        """See :meth:`Caller.reply`."""
        self.start()
        try:
            # As a text: what a model wrote is none of the marks of a message.
            text = json.dumps(arguments)
            said = self._process.ask("call", seconds=seconds, arguments=text)
        except RecursionError:
            return ToolError("the arguments nest too deep")
        except ProcessLostError as lost:
            self._process.kill()
            self._begin()
            why, _, trace = lost.detail.partition("\n")
            return Failure(why, trace)
        if "refusal" in said:
            return ToolError(said["refusal"])
        return Failure(said["why"], said["trace"]) if "why" in said else str(said["reply"])

    def close(self) -> None:
        """See :meth:`Caller.close`."""
        self._process.kill()


def main(lifeline: int, commands: int) -> None:
    """Serve one caller until it is closed; see :func:`~rlinf.processes.child.serve`."""
    tool: FunctionTool | None = None

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal tool
        if message["operation"] == "call" and tool is not None:
            reply = called(tool, json.loads(message["arguments"]))
            if isinstance(reply, ToolError):
                return {"refusal": str(reply)}
            return {"reply": reply} if isinstance(reply, str) else vars(reply)
        if message["operation"] == "start":
            tool = FunctionTool(FunctionToolConfig.model_validate(message["config"]))
            tool.check_calls(by_names=message["by_names"])
        return {}

    serve(lifeline, commands, answer)
