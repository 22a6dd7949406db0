"""Calls of tools in a model's tokens, and the tokens of their replies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from rlinf.agents.call_forms import Call, CallForm, ChatTemplate, Tags
from rlinf.agents.tool import AgentConfig, ToolConfig, ToolError
from rlinf.agents.tool_calls import Caller, ThreadCaller, ToolCalls
from rlinf.config.registry import load_attribute
from rlinf.errors import RunFailure, in_section

_Waiting = queue.SimpleQueue[tuple[Call | ToolError, Future[str]] | None]

_CHARACTERS = 64
"""Of a reply that are looked at for each token that it may have."""


class ToolReplies:
    """What follows a turn that calls tools, once all of them have replied.

    Args:
        around: Tokens before, between and behind the replies.
        replies: The texts of the replies.
        shown: Gives the tokens of one.
    """

    def __init__(
        self,
        around: Sequence[Sequence[int]],
        replies: Sequence[Future[str]],
        shown: Callable[[str], list[int]],
    ) -> None:
        self._around, self._replies, self._shown = around, replies, shown

    @property
    def missing(self) -> list[Future[str]]:
        """Replies that are not there yet."""
        return [reply for reply in self._replies if not reply.done()]

    def tokens(self) -> np.ndarray:
        """[m] int64, after a wait for what is missing; raises what :meth:`ToolCalls.call` does."""
        first, *others = self._around
        given = list(first)
        for reply, behind in zip(self._replies, others, strict=True):
            given += self._shown(reply.result())
            given += behind
        return np.array(given, np.int64)


class ToolUse:
    """Says what follows a turn of the model, in the tokens of its tokenizer.

    Args:
        config: The tools, and in which form they are called.
        tokenizer: Of the model.
        template_arguments: What its chat template is told beside the messages.
    """

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: Any,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._tools: dict[str, ToolCalls] = {}
        for name, section in config.tools.items():
            with in_section(f"rollout.agent.tools.{name}"):
                begin = _callers(name, section, by_names=config.calls == "chat_template")
                self._tools[name] = ToolCalls(name, begin, seconds=config.max_call_seconds)
        coded = (self._encoded, self._decoded)
        self._form: CallForm
        if config.calls == "tags":
            self._form = Tags(self._tools, config.around_reply, *coded)
        else:
            self._form = ChatTemplate(self._tools, tokenizer, template_arguments or {}, *coded)
        self.turn_ends = self._form.turn_ends
        """Tokens that end a call."""
        self.stop = self._form.stop
        """Texts that end a call and are more than one token."""
        self._waiting: _Waiting = queue.SimpleQueue()
        self._callers: list[threading.Thread] = []

    def calls(self, turn: Sequence[int] | np.ndarray) -> list[Call | ToolError]:
        """What a turn calls; none: the answer is over."""
        return self._form.calls([int(token) for token in turn])

    def reply(
        self, turn: Sequence[int] | np.ndarray, calls: Sequence[Call | ToolError]
    ) -> ToolReplies:
        """Call what a turn calls; the reply may take its time where several calls may."""
        around = self._form.around([int(token) for token in turn], len(calls))
        most = self._config.max_calls
        others = ToolError(f"too many calls; the first {most} of a turn are made")
        made = [*calls[:most], *(others for _ in calls[most:])]
        return ToolReplies(around, [self._begun(call) for call in made], self._shown)

    def _begun(self, call: Call | ToolError) -> Future[str]:
        found: Future[str] = Future()
        most = self._config.max_calls_at_once
        if most == 1:
            found.set_result(self._result(call))
            return found
        if len(self._callers) < most:
            caller = threading.Thread(target=self._run, name="calls of tools", daemon=True)
            self._callers.append(caller)
            caller.start()
        self._waiting.put((call, found))
        return found

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, found = item
            try:
                found.set_result(self._result(call))
            except BaseException as error:  # noqa: BLE001 - raised where the reply is asked for
                found.set_exception(error)

    @property
    def failures(self) -> int:
        """Calls so far that a tool failed."""
        return sum(tool.failures for tool in self._tools.values())

    def close(self) -> None:
        """Let the tools go."""
        for _ in self._callers:
            self._waiting.put(None)
        for tool in self._tools.values():
            tool.close()

    def demonstration(self, said: str) -> tuple[list[int], list[bool]]:
        """Tokens of an answer with the replies to its calls, and which of them the model says; in
        the form of tags.

        Raises:
            RunFailure: A tool failed, which is nothing to be taught.
        """
        assert isinstance(self._form, Tags), "a rule of the config"
        tokens: list[int] = []
        sampled: list[bool] = []
        for turn in self._form.turns(said):
            own = self._encoded(turn)
            calls = self.calls(own)
            given = self.reply(own, calls).tokens().tolist() if calls else []
            tokens += own + given
            sampled += [True] * len(own) + [False] * len(given)
        if self.failures:
            raise RunFailure(f"a tool failed at a call of what is to be learnt: {said[:200]!r}")
        return tokens, sampled

    def _result(self, call: Call | ToolError) -> str:
        """What a tool says to a call."""
        try:
            if isinstance(call, ToolError):
                raise call
            return self._tools[call.name].call(call.arguments)
        except ToolError as error:
            return f"error: {error}"

    def _shown(self, reply: str) -> list[int]:
        most = self._config.max_reply_tokens
        # Cut before it is tokenised, which of a text without end takes all the memory there is.
        # Whatever a tool replies is text: a mark in it ends no turn and speaks for nobody. Half a
        # character, which JSON of another program may hold, is none that a tokenizer takes.
        shown = reply[: _CHARACTERS * most].encode("utf-8", "replace").decode()
        return self._encoded(shown, split_special_tokens=True)[:most]

    def _encoded(self, text: str, **options: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False, **options)
        return tokens

    def _decoded(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


def _callers(name: str, section: ToolConfig, *, by_names: bool) -> Callable[[], Caller]:
    """What begins those that call a tool, one for each call at the same time."""
    if section.caller is not None:
        return partial(load_attribute(section.caller), section, by_names=by_names)
    tool = section.build()
    tool.check_calls(by_names=by_names)
    return partial(ThreadCaller, name, tool)
