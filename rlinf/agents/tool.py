"""What a tool is: text in, text out; imports no torch, so that recipes are checked at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from rlinf.config.base import StrictModel
from rlinf.config.registry import load_attribute


class ToolError(Exception):
    """A call that a tool cannot answer; its text is what the model is told."""


class Tool(ABC):
    """Something that a model can call in its answer.

    What a call replies is a function of its arguments alone: a run that is continued, or placed
    otherwise, calls again. It must come to its end quickly, as answers wait for it.
    """

    alphabet: str = ""
    """Characters that replies have besides digits, for a tokenizer that is trained for a run."""

    @abstractmethod
    def call(self, arguments: str) -> str:
        """The reply to a call.

        Args:
            arguments: What the model wrote, as it is: anything.

        Raises:
            ToolError: The call cannot be answered; the model is told why.
        """


class ToolConfig(StrictModel):
    """Base of every tool's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the tool, imported when it is built."""

    type: str
    """Which tool this section configures."""

    def build(self) -> Tool:
        """The tool.

        Raises:
            ConfigError: What the section names cannot be used.
            MissingPackageError: A package is not installed.
        """
        tool: Tool = load_attribute(self.implementation)(self)
        return tool
