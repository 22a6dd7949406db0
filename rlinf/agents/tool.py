"""What a tool is (text in, text out), which ones exist, and the answers in turns that call them.

Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.registry import Registry, load_attribute

_TAKEN = {"answer", "result", "think"}


class ToolError(Exception):
    """A call that a tool cannot answer; its text is what the model is told."""


class Tool(ABC):
    """Something that a model can call in its answer.

    What a call replies is a function of its arguments alone: a run that is continued, or placed
    otherwise, calls again. It must come to its end quickly, as answers wait for it, and let other
    threads run meanwhile. Calls come from threads that are not the main one: one after the other,
    unless `max_calls_at_once` says more.
    """

    alphabet: str = ""
    """Characters that replies have besides digits, for a tokenizer that is trained for a run."""

    @abstractmethod
    def call(self, arguments: str) -> str:
        """The reply to what the model wrote, which may be anything.

        ToolError where it cannot be answered; the model is told why. Of anything else that is
        raised it is told that the tool failed, and it is counted.
        """

    def check_calls(self, *, by_names: bool) -> None:
        """Refuse, by a ConfigError, what calls by a text, or ``by_names``, could never be answered
        with."""

    def call_by_names(self, arguments: Mapping[str, Any]) -> str:
        """The reply to a call whose form has a value for each name: that of :meth:`call` to the
        only one, where it is a text, else to all of them as JSON."""
        values = list(arguments.values())
        if len(values) == 1 and isinstance(values[0], str):
            return self.call(values[0])
        return self.call(json.dumps(arguments, ensure_ascii=False))


class ToolConfig(StrictModel):
    """Base of every tool's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the tool, imported when it is built."""
    caller: ClassVar[str | None] = None
    """``module:Class`` of the :class:`~rlinf.agents.tool_calls.Caller` that makes the calls; None:
    threads of the worker do."""

    type: str
    """Which tool this section configures."""

    def build(self) -> Tool:
        """The tool; UserError if what the section names, or a package, is not there."""
        tool: Tool = load_attribute(self.implementation)(self)
        return tool

    def check_described(self, arguments: Sequence[str]) -> None:
        """Refuse, by a ConfigError, a tool that cannot be called with values of these names, which
        are those that a model is told of."""


TOOLS = {
    "calculator": "rlinf.agents.calculator:CalculatorConfig",
    "function": "rlinf.agents.function_tool:FunctionToolConfig",
}

REGISTRY = Registry("tool", "rlinf.tools", TOOLS, ToolConfig)
"""Packages outside add tools by entry points in this group that name their config classes."""


class AgentConfig(StrictModel):
    """Answers in turns: a call ends a turn, the reply of the tool follows, and the model goes
    on."""

    only_with: ClassVar = {"reply": "calls: tags"}

    tools: dict[str, Annotated[ToolConfig, Component(REGISTRY)]] = Field(min_length=1)
    """The tools by the names under which the model calls them."""
    calls: Literal["tags", "chat_template"] = "tags"
    """In which form: `tags`, `<NAME>…</NAME>` and the reply as `reply` says; `chat_template`,
    `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>` as Hermes and Qwen models write it,
    and replies as messages of the role `tool`."""
    reply: str = "<result>{}</result>"
    """What the model is given after a call between tags, with `{}` where the reply of the tool
    stands: the form that it was taught."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of an answer; a call in the last one cuts the answer off."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens at which a turn, and with it the answer, is cut off; null: only
    `rollout.sampling.max_new_tokens` bounds them, which counts replies too."""
    max_call_seconds: float = Field(default=10.0, gt=0, le=3600)
    """Time of a call; one that takes longer has failed, as one that raises has. A function of your
    own is then ended, whatever it does; a tool of a package must let other threads run."""
    max_calls: int = Field(default=16, ge=1)
    """Calls of one turn that are made; those behind them are answered that there are too many."""
    max_calls_at_once: int = Field(default=1, ge=1, le=1024)
    """Calls of a worker that are under way at the same time, beside the engine, which each tool
    must allow; 1: one after the other, and the engine waits."""
    max_reply_tokens: int = Field(default=64, ge=1)
    """Tokens of a reply, without what stands around it; what is longer is cut off."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        form, taken = r"[a-z][a-z0-9_]*", _TAKEN
        legal = "small letters, digits and _, and none of " + ", ".join(sorted(_TAKEN))
        if self.calls == "chat_template":
            form, taken, legal = r"[A-Za-z_][\w.-]*", set(), "letters, digits, _, - and ."
        for name in self.tools:
            if not re.fullmatch(form, name) or name in taken:
                raise illegal(f"tools.{name}", "cannot be the name of a tool", hint=legal)
        return self

    @field_validator("reply")
    @classmethod
    def _check_reply(cls, value: str) -> str:
        if value.count("{}") != 1 or value == "{}":  # a tool may reply nothing
            raise ValueError(
                "needs one {}, for what the tool replies, in a text: <result>{}</result>"
            )
        return value

    @property
    def around_reply(self) -> tuple[str, str]:
        """What stands before and behind the reply to a call."""
        before, _, behind = self.reply.partition("{}")
        return before, behind

    @property
    def whole(self) -> tuple[str, ...]:
        """Texts that a tokenizer that is trained for the run should take for one token each."""
        calls = [mark for name in self.tools for mark in (f"<{name}>", f"</{name}>")]
        given = [mark for text in self.around_reply for mark in re.findall(r"<[^<>\s]+>", text)]
        return tuple(dict.fromkeys([*calls, *given]))
