"""A tool that is a function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlinf.agents.tool import Tool, ToolConfig, ToolError
from rlinf.config.nearest import did_you_mean
from rlinf.config.user_function import UserFunctionConfig
from rlinf.errors import ConfigError


class FunctionToolConfig(UserFunctionConfig, ToolConfig):
    """A function of your own, from a text to a text."""

    implementation = "rlinf.agents.function_tool:FunctionTool"
    caller = "rlinf.agents.function_process:FunctionProcess"
    called_by_names = True
    type: Literal["function"] = "function"
    """Which tool this section configures."""
    alphabet: str = ""
    """Characters that replies have besides digits, for a tokenizer that is trained for the run."""

    def check_described(self, arguments: Sequence[str]) -> None:
        """See :meth:`ToolConfig.check_described`; looks at what is written, and runs nothing."""
        if (function := self.as_written()) is None:
            return
        signature = inspect.signature(function)
        try:
            signature.bind(**dict.fromkeys([*arguments, *self.options]))
        except TypeError as error:
            own = [each for each in signature.parameters if each not in self.options]
            unknown = next((each for each in arguments if each not in own), "")
            name, told = self.function.rpartition(":")[2], ", ".join(arguments) or "nothing"
            raise ConfigError(
                f"{name}{signature} cannot be called with the arguments that the model is told of "
                f"({told}): {error}; {did_you_mean(unknown, own)}".rstrip("; "),
                key="function",
            ) from error


class FunctionTool(Tool):
    """``function(arguments, **options)`` gives the reply; where calls have names,
    ``function(**arguments, **options)``."""

    def __init__(self, config: FunctionToolConfig) -> None:
        self._config, self._function = config, config.load()
        self._options = config.options
        self.alphabet = config.alphabet

    def check_calls(self, *, by_names: bool) -> None:
        """Refuse a function that takes no text alone."""
        self._config.check_call(self._function, by_names=by_names)

    def call(self, arguments: str) -> str:
        """What the function returns, or raises."""
        reply: str = self._function(arguments, **self._options)
        return reply

    def call_by_names(self, arguments: Mapping[str, Any]) -> str:
        """The same of a call with names; ToolError where the function does not take them."""
        given = {**arguments, **self._options}
        try:
            inspect.signature(self._function).bind(**given)
        except TypeError as error:
            raise ToolError(str(error)) from error
        reply: str = self._function(**given)
        return reply
