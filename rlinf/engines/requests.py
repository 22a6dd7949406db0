"""What every engine keeps of its requests, and how their answers are put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rlinf.data.sequences import Completion, StopReason
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.errors import ConfigError

StateT = TypeVar("StateT")


class Unfinished(dict[int, StateT]):
    """Requests that were taken and not returned yet, by number, with what is noted of each.

    ``context`` is the longest prompt plus completion (None: unbounded), ``vocabulary`` is V.
    """

    def __init__(self, *, context: int | None, vocabulary: int) -> None:
        super().__init__()
        self._context, self._vocabulary = context, vocabulary

    def check(self, request: GenerationRequest, *, pictures: bool = False) -> None:
        """Refuse a request that cannot be served; ``pictures``: whether these can be read.

        Raises:
            ConfigError: It would be longer than the context of the model, or has pictures.
            ValueError: Its number is in use, the prompt is empty or holds a token that is not one,
                the seed is negative, or the partial completion has nothing to be continued.
        """
        if request.request_id in self:
            raise ValueError(f"request {request.request_id} is unfinished")
        prompt, most = request.prompt_tokens, request.sampling.max_new_tokens
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(f"prompt_tokens of shape {prompt.shape}, expected [P] with P >= 1")
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise ValueError(f"a prompt token is not within the {self._vocabulary} of the model")
        if request.pictures and not pictures:
            raise ConfigError("the prompt has pictures, which this engine and model do not read")
        if request.seed < 0:
            raise ValueError(f"seed {request.seed} is negative")
        if self._context is not None and len(prompt) + most > self._context:
            raise ConfigError(
                f"{most} new tokens after a prompt of {len(prompt)} exceed the model's context of "
                f"{self._context}; nearest: {max(self._context - len(prompt), 0)}",
                key="max_new_tokens",
            )
        if request.partial is not None and len(request.partial) >= most:
            raise ValueError(
                f"a partial completion of {len(request.partial)} tokens leaves none of "
                f"max_new_tokens {most}"
            )

    def chosen(self, request_ids: Iterable[int] | None) -> list[int]:
        """Those of ``request_ids`` that are unfinished; None: all."""
        wanted = self if request_ids is None else dict.fromkeys(request_ids)
        return [number for number in wanted if number in self]

    def require_none(self) -> None:
        """Refuse to go on while there are any, by a RuntimeError."""
        if self:
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


def text_reach(stop: Sequence[str]) -> int:
    """Tokens at the end of a turn in which a stop text that it ends with lies."""
    # Each token is at least a byte, and at most the last one completes a character.
    return max(len(text.encode()) for text in stop) + 3


def ends_with_text(tail: np.ndarray, stop: Sequence[str], tokenizer: Any) -> bool:
    """Whether a stop text was completed by the last of the tokens, of which ``tail`` are the last
    :func:`text_reach`."""
    ending = tokenizer.decode(tail)
    found = [text for text in stop if text in ending]
    if not found:
        return False
    before = tokenizer.decode(tail[:-1])
    return any(ending.rfind(text) > before.rfind(text) for text in found)


def _completed_text(request: GenerationRequest, tokens: np.ndarray, tokenizer: Any) -> int | None:
    """How many of the new tokens complete a stop text that what was given began; None: there is
    none. Servers look for stop texts in new tokens alone."""
    given, sampling = request.partial, request.sampling
    if given is None or not sampling.stop or given.turn_start == len(given):
        return None
    reach, text = text_reach(sampling.stop), np.concatenate([given.tokens, tokens])
    first = max(len(given) + 1, sampling.min_new_tokens)
    for length in range(first, min(len(text), len(given) + reach) + 1):
        tail = text[max(given.turn_start, length - reach) : length]
        if ends_with_text(tail, sampling.stop, tokenizer):
            return length - len(given)
    return None


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
    *,
    tokenizer: Any = None,
) -> FinishedCompletion:
    """A request with its new tokens, log-probs and versions [n] behind those it began with. With a
    ``tokenizer`` it ends where a stop text was completed that these began."""
    most = None if tokenizer is None else _completed_text(request, np.array(tokens), tokenizer)
    if most is not None:
        tokens, log_probs, versions = tokens[:most], log_probs[:most], versions[:most]
        reason = "stop"
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
