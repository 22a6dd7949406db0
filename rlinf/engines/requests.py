"""What every engine keeps of its requests: which are unfinished, and how their answers are put
together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from rlinf.data.sequences import Completion, StopReason
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest, check_request

StateT = TypeVar("StateT")


class Unfinished(Generic[StateT]):
    """Requests that were taken and not returned yet, each with what the engine notes of it.

    Args:
        context: Longest prompt plus completion of the model; None: unbounded.
        vocabulary: V, rows of its embedding.
    """

    def __init__(self, *, context: int | None, vocabulary: int) -> None:
        self._context, self._vocabulary = context, vocabulary
        self._states: dict[int, StateT] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __contains__(self, number: int) -> bool:
        return number in self._states

    def __getitem__(self, number: int) -> StateT:
        return self._states[number]

    def __setitem__(self, number: int, state: StateT) -> None:
        self._states[number] = state

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request whose number is in use, or that no engine can serve.

        Raises:
            ConfigError: See :func:`~rlinf.engines.protocol.check_request`.
            ValueError: Likewise, or its number is in use.
        """
        if request.request_id in self._states:
            raise ValueError(f"request {request.request_id} is unfinished")
        check_request(request, context=self._context, vocabulary=self._vocabulary)

    def chosen(self, request_ids: Sequence[int] | None) -> list[int]:
        """Those of ``request_ids`` that are unfinished; None: all."""
        wanted = self._states if request_ids is None else dict.fromkeys(request_ids)
        return [number for number in wanted if number in self._states]

    def pop(self, number: int) -> StateT:
        """Forget a request; returns what was noted of it."""
        return self._states.pop(number)

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()

    def require_none(self) -> None:
        """Refuse to go on while there are any.

        Raises:
            RuntimeError: There are.
        """
        if self._states:
            raise RuntimeError(f"{len(self)} requests are unfinished; abort them first")


def text_of(request: GenerationRequest) -> np.ndarray:
    """[P + given] tokens that stand before the first new one."""
    if request.partial is None:
        return request.prompt_tokens
    text: np.ndarray = np.concatenate([request.prompt_tokens, request.partial.tokens])
    return text


def given_tokens(request: GenerationRequest) -> int:
    """Tokens of the completion that the request begins with."""
    return 0 if request.partial is None else len(request.partial)


def stop_tokens(request: GenerationRequest, end_tokens: Sequence[int]) -> tuple[int, ...]:
    """What ends a request; ``end_tokens`` where its sampling does not say."""
    stops = request.sampling.stop_token_ids
    return (*(end_tokens if stops is None else stops), *request.turn_ends)


def extended_mask(given: Completion, length: int) -> np.ndarray | None:
    """[length] which tokens were sampled, of a completion that was continued by sampled ones."""
    if given.sampled is None:
        return None
    return np.pad(given.sampled, (0, length - len(given)), constant_values=True)


def answer(
    request: GenerationRequest,
    tokens: Sequence[int] | np.ndarray,
    log_probs: Sequence[float] | np.ndarray,
    versions: Sequence[int] | np.ndarray,
    reason: StopReason,
) -> FinishedCompletion:
    """A request with its new tokens behind those that it began with.

    Args:
        request: The request.
        tokens: [n] new tokens.
        log_probs: [n] of them.
        versions: [n] of the weights that sampled them.
        reason: Why it ended.
    """
    completion = Completion(
        tokens=np.array(tokens, np.int64),
        log_probs=np.array(log_probs, np.float32),
        versions=np.array(versions, np.int64),
        stop_reason=reason,
        seed=request.seed,
    )
    given = request.partial
    if given is not None:
        completion = replace(
            completion,
            tokens=np.concatenate([given.tokens, completion.tokens]),
            log_probs=np.concatenate([given.log_probs, completion.log_probs]),
            versions=np.concatenate([given.versions, completion.versions]),
            sampled=extended_mask(given, len(given) + len(completion)),
        )
    return FinishedCompletion(request_id=request.request_id, completion=completion)
