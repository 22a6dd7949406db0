"""A tokenizer with the marks of a calculator, and an engine that says what a script tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.agents.tool import AgentConfig, Tool
from rlinf.agents.tool_calls import ThreadCaller, ToolCalls
from rlinf.data.sequences import StopReason
from rlinf.data.tasks import ANSWER_TAGS
from rlinf.data.tokenizer import train_tokenizer
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest, Weights
from rlinf.engines.requests import answer, given_tokens, stop_tokens

CALCULATOR = AgentConfig(tools={"calc": {"type": "calculator"}})
ALPHABET = "0123456789+-*/()= :.abcdefghijklmnopqrstuvwxyz"


def tokenizer(folder: Path) -> Any:
    """One token for each character and mark."""
    return train_tokenizer([ALPHABET], folder, whole=(*ANSWER_TAGS, *CALCULATOR.whole))


class Told(Tool):
    """Does what a function does."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def call(self, arguments: str) -> str:
        found: str = self._function(arguments)
        return found


def calls_of(name: str, function: Callable[[str], Any], *, seconds: float) -> ToolCalls:
    """Calls of a tool that does what a function does."""
    return ToolCalls(name, partial(ThreadCaller, name, Told(function)), seconds=seconds)


class ScriptedEngine(Engine):
    """Says the tokens of a script one by one; stops where an engine does.

    Args:
        script: What it says in all turns of a request, by the request's number.
        end: Its end token.
    """

    continues_exactly = True

    def __init__(self, script: Mapping[int, Sequence[int]], end: int) -> None:
        self._script, self._end = script, end
        self._running: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self.taken: list[GenerationRequest] = []
        self.version = 0

    def submit(self, request: GenerationRequest) -> None:
        assert given_tokens(request) < request.sampling.max_new_tokens
        self.taken.append(request)
        self._running[request.request_id] = (request, [])

    def step(self) -> list[FinishedCompletion]:
        finished = []
        for number, (request, said) in list(self._running.items()):
            before = 0 if request.partial is None else len(request.partial.sampled_tokens)
            said.append(self._script[number][before + len(said)])
            if said[-1] in stop_tokens(request, (self._end,)):
                finished.append(self._ended(number, "stop"))
            elif given_tokens(request) + len(said) == request.sampling.max_new_tokens:
                finished.append(self._ended(number, "length"))
        return finished

    def _ended(self, number: int, reason: StopReason) -> FinishedCompletion:
        request, said = self._running.pop(number)
        log_probs = [-float(token) for token in said]
        return answer(request, said, log_probs, [self.version] * len(said), reason)

    @property
    def unfinished(self) -> int:
        return len(self._running)

    def progress(self) -> dict[int, int]:
        return {n: given_tokens(r) + len(said) for n, (r, said) in self._running.items()}

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        chosen = self._running if request_ids is None else request_ids
        return [self._ended(number, "abort") for number in list(chosen) if number in self._running]

    def update_weights(self, weights: Weights, version: int) -> None:
        self.version = version

    def release_memory(self) -> None: ...

    def restore_memory(self) -> None: ...

    def close(self) -> None: ...


def array(tokens: Sequence[int]) -> np.ndarray:
    """Tokens as engines take them."""
    return np.array(tokens, np.int64)
