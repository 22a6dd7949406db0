"""Calls of tools in a model's tokens, and the tokens of their replies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.agents.tool import RESULT_TAGS, AgentConfig, ToolError
from rlinf.agents.tool_calls import ToolCalls
from rlinf.errors import RunFailure, in_section


class ToolUse:
    """Says what follows a turn of the model, in the tokens of its tokenizer."""

    def __init__(self, config: AgentConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._tools: dict[str, ToolCalls] = {}
        for name, section in config.tools.items():
            with in_section(f"rollout.agent.tools.{name}"):
                tool = section.build()
            self._tools[name] = ToolCalls(name, tool, seconds=config.max_call_seconds)
        self._ends = {f"</{name}>": name for name in self._tools}
        single = {end: self._encoded(end) for end in self._ends}
        self.turn_ends = tuple(tokens[0] for tokens in single.values() if len(tokens) == 1)
        """Tokens that end a call."""
        self.stop = tuple(end for end, tokens in single.items() if len(tokens) > 1)
        """Texts that end a call and are more than one token."""

    def reply(self, turn: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """The tokens [m] that follow a turn; None where it calls no tool: the answer is over."""
        tokens = [int(token) for token in turn]
        text, before = self._decoded(tokens), self._decoded(tokens[:-1])
        for end, name in self._ends.items():
            # The last token completed the call; one in the middle of a turn is only text.
            if text.count(end) > before.count(end):
                return self._wrapped(self._result(name, text[: text.rindex(end)]))
        return None

    @property
    def failures(self) -> int:
        """Calls so far that a tool failed."""
        return sum(tool.failures for tool in self._tools.values())

    def close(self) -> None:
        """Let the tools go."""
        for tool in self._tools.values():
            tool.close()

    def demonstration(self, said: str) -> tuple[list[int], list[bool]]:
        """Tokens of an answer with the replies to its calls, and which of them the model says.

        Raises:
            RunFailure: A tool failed, which is nothing to be taught.
        """
        ends = "|".join(re.escape(end) for end in self._ends)
        tokens: list[int] = []
        sampled: list[bool] = []
        for turn in re.findall(f".*?(?:{ends})|.+", said, re.DOTALL):
            own = self._encoded(turn)
            reply = self.reply(own)
            given = [] if reply is None else reply.tolist()
            tokens += own + given
            sampled += [True] * len(own) + [False] * len(given)
        if self.failures:
            raise RunFailure(f"a tool failed at a call of what is to be learnt: {said[:200]!r}")
        return tokens, sampled

    def _result(self, name: str, before: str) -> str:
        """What a tool says to the call that a text ends in."""
        begin = f"<{name}>"
        try:
            if begin not in before:
                raise ToolError("call without a beginning")
            return self._tools[name].call(before[before.rindex(begin) + len(begin) :])
        except ToolError as error:
            return f"error: {error}"

    def _wrapped(self, text: str) -> np.ndarray:
        inner = self._encoded(text)[: self._config.max_reply_tokens]
        opening, closing = (self._encoded(tag) for tag in RESULT_TAGS)
        return np.array([*opening, *inner, *closing], np.int64)

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text
