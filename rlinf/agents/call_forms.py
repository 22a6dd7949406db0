"""In which form a model calls tools and is told what they reply: tags, or its chat template."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.agents.tool import ToolError
from rlinf.errors import ConfigError

CALL_TAGS = ("<tool_call>", "</tool_call>")
"""What stands around a call in the form of Hermes, which Qwen has taken over."""
_THINK, _THOUGHT = "<think>", "</think>"
_MARKS = re.compile("|".join((_THINK, _THOUGHT, CALL_TAGS[0])))
_SAID, _REPLIED = "TURN-OF-THE-ASSISTANT", "REPLY-OF-TOOL-"


@dataclass(frozen=True)
class Call:
    """What a model wrote to call a tool."""

    name: str
    arguments: str | Mapping[str, Any]
    """A text between tags, or values by name."""


class CallForm(ABC):
    """Finds calls in what a model says, and says what stands around the replies."""

    turn_ends: tuple[int, ...] = ()
    """Tokens that end a turn with a call, besides those that end an answer."""
    stop: tuple[str, ...] = ()
    """Texts that do, and are more than one token."""

    @abstractmethod
    def calls(self, turn: Sequence[int]) -> list[Call | ToolError]:
        """The calls at the end of a turn, or why one cannot be answered; none: the answer is
        over."""

    @abstractmethod
    def around(self, turn: Sequence[int], count: int) -> list[list[int]]:
        """Tokens before the first of ``count`` replies to a turn, between them, and behind the
        last."""


class Tags(CallForm):
    """``<NAME>…</NAME>`` ends a turn and calls the tool NAME; the reply stands between two texts.

    Args:
        names: Of the tools.
        around: What stands before and behind a reply.
        encode: Tokens of a text, marks included.
        decode: Text of tokens.
    """

    def __init__(
        self,
        names: Collection[str],
        around: tuple[str, str],
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._ends, self._decode = {f"</{name}>": name for name in names}, decode
        self._around = [encode(text) for text in around]
        single = {end: encode(end) for end in self._ends}
        self.turn_ends = tuple(tokens[0] for tokens in single.values() if len(tokens) == 1)
        self.stop = tuple(end for end, tokens in single.items() if len(tokens) > 1)

    def calls(self, turn: Sequence[int]) -> list[Call | ToolError]:
        """The one that the last token completed; one in the middle of a turn is only text."""
        text, before = self._decode(turn), self._decode(turn[:-1])
        for end, name in self._ends.items():
            if text.count(end) > before.count(end):
                said, begin = text[: text.rindex(end)], f"<{name}>"
                if begin not in said:
                    return [ToolError("call without a beginning")]
                return [Call(name, said[said.rindex(begin) + len(begin) :])]
        return []

    def around(self, turn: Sequence[int], count: int) -> list[list[int]]:
        """The two texts."""
        del turn
        assert count == 1, "a turn ends with its first call"
        return self._around

    def turns(self, said: str) -> list[str]:
        """A whole answer, cut behind each call."""
        ends = "|".join(re.escape(end) for end in self._ends)
        return re.findall(f".*?(?:{ends})|.+", said, re.DOTALL)


class ChatTemplate(CallForm):
    """``<tool_call>{"name": NAME, "arguments": {…}}</tool_call>``, as often as the model likes; the
    turn ends as any answer does. Replies are messages of the role ``tool`` in the chat template of
    the tokenizer, which is what a model that was published with tools knows.

    Args:
        names: Of the tools.
        tokenizer: With the template.
        template_arguments: What the template is told beside the messages.
        encode: Tokens of a text, marks included.
        decode: Text of tokens.

    Raises:
        ConfigError: The template does not take messages of tools.
    """

    def __init__(
        self,
        names: Collection[str],
        tokenizer: Any,
        template_arguments: Mapping[str, Any],
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._names, self._encode, self._decode = sorted(names), encode, decode
        self._tokenizer, self._arguments = tokenizer, dict(template_arguments)
        self._parts: dict[int, list[str]] = {}
        begun = self._behind(1)[-1]
        self._begun = _THINK if begun.rfind(_THINK) > begun.rfind(_THOUGHT) else ""

    def calls(self, turn: Sequence[int]) -> list[Call | ToolError]:
        """All calls of a turn outside its thoughts, in their order; a thought that does not end
        goes on to the end of the turn."""
        text = self._begun + self._decode(turn)
        return [self._call(each) for each in _between_call_tags(text)]

    def _call(self, text: str) -> Call | ToolError:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as error:
            return ToolError(f"the call is no JSON: {error}")
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return ToolError('a call is {"name": …, "arguments": {…}}')
        arguments = said.get("arguments", {})
        if isinstance(arguments, str):  # some models write it as JSON in JSON
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return ToolError("the arguments are no JSON")
        if said["name"] not in self._names:
            known = ", ".join(self._names)
            return ToolError(f"there is no tool {said['name'][:100]}; there are: {known}")
        if not isinstance(arguments, dict):
            return ToolError("the arguments are no object with their names")
        return Call(said["name"], arguments)

    def around(self, turn: Sequence[int], count: int) -> list[list[int]]:
        """What the template writes between the turn and its replies, and up to where the model
        goes on."""
        first, *others = self._behind(count)
        # The token that ended the turn is the model's own; the template writes it, too.
        ended = self._decode(turn[-1:])
        first = first.removeprefix(ended) if first.startswith(ended) else first
        return [self._encode(part) if part else [] for part in (first, *others)]

    def _behind(self, count: int) -> list[str]:
        """The text of the template behind what the model said, cut at ``count`` replies."""
        if count not in self._parts:
            marks = [f"{_REPLIED}{number}." for number in range(count)]
            messages = [
                {"role": "user", "content": "Question"},
                {"role": "assistant", "content": _SAID},
                *({"role": "tool", "content": mark} for mark in marks),
            ]
            try:
                text: str = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self._arguments
                )
            except Exception as error:
                raise _no_messages_of_tools(f": {error}") from error
            pieces = re.split("|".join(map(re.escape, (_SAID, *marks))), text)
            if len(pieces) != count + 2:
                raise _no_messages_of_tools("")
            self._parts[count] = pieces[1:]
        return self._parts[count]


def _between_call_tags(text: str) -> list[str]:
    """What stands between tags of calls outside thoughts, in time proportional to the text.

    What comes first counts: a mark in a call is text, and so is a call in a thought. A thought that
    began before the turn has its end alone.
    """
    found: list[str] = []
    behind, last = 0, text.rfind(CALL_TAGS[1])
    while mark := _MARKS.search(text, behind):
        behind = mark.end()
        if mark[0] == _THOUGHT:
            found = []
        elif mark[0] == _THINK:
            thought = text.find(_THOUGHT, behind)
            behind = len(text) if thought < 0 else thought + len(_THOUGHT)
        elif behind <= last:  # without an end a mark is text, and no end is looked for
            end = text.index(CALL_TAGS[1], behind)
            found.append(text[behind:end])
            behind = end + len(CALL_TAGS[1])
    return found


def _no_messages_of_tools(why: str) -> ConfigError:
    return ConfigError(
        f"the chat template of the model writes no messages of the role `tool`{why}; nearest: "
        "calls: tags, or a template with data.chat_template",
        key="rollout.agent.calls",
    )
