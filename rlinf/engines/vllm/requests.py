"""Requests in vLLM's words, and what comes back of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.data.sequences import StopReason
from rlinf.engines.config import SamplingConfig, VLLMEngineConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.engines.requests import answer, given_tokens, stop_tokens
from rlinf.errors import ConfigError


@dataclass(eq=False)
class Growing:
    """What a request has so far.

    Args:
        request: The request.
        tokens: New ones.
        log_probs: Of the new tokens.
        versions: Of the weights that sampled them.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Tokens so far, with those that the request began with."""
        return given_tokens(self.request) + len(self.tokens)

    def add(self, part: Any) -> int:
        """Take the new tokens of a ``CompletionOutput``; returns how many they are."""
        # Log-probs first: whoever asks how many tokens there are counts whole ones.
        for token, options in zip(part.token_ids, part.logprobs or (), strict=True):
            self.log_probs.append(options[token].logprob)
            self.tokens.append(token)
        return len(part.token_ids)

    def finished(self, reason: StopReason) -> FinishedCompletion:
        """The answer, ended for a reason."""
        return answer(self.request, self.tokens, self.log_probs, self.versions, reason)


def sampling_parameters(request: GenerationRequest, end_tokens: Sequence[int]) -> Any:
    """The ``SamplingParams`` of a request.

    Args:
        request: The request; what it begins with counts for its lengths.
        end_tokens: What ends a completion where the request does not say.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, done = request.sampling, given_tokens(request)
    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_new_tokens - done,
        min_tokens=max(sampling.min_new_tokens - done, 0),
        stop_token_ids=list(stop_tokens(request, end_tokens)),
        stop=list(sampling.stop),
        ignore_eos=True,
        seed=_seed(request.seed, done),
        logprobs=0,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _seed(seed: int, done: int) -> int:
    """The seed of a request, another one for what is continued: equal numbers would repeat."""
    if not done:
        return seed % 2**63
    return int(np.random.SeedSequence((seed, done)).generate_state(1, np.uint64)[0] >> 1)


def check_scored(sampling: SamplingConfig, config: VLLMEngineConfig) -> None:
    """Refuse what vLLM would score otherwise than softmax(logits / temperature).

    Raises:
        ConfigError: It would.
    """
    if config.log_probs == "raw" and sampling.temperature != 1:
        raise ConfigError(
            f"{sampling.temperature} is not seen by vLLM's raw log-probs; nearest: 1.0, or "
            "log_probs: processed for the engine",
            key="temperature",
        )
    if config.log_probs == "processed" and (sampling.filtered or sampling.min_new_tokens):
        raise ConfigError(
            "top_k, top_p, repetition_penalty and min_new_tokens change what vLLM reports as "
            "processed log-probs; leave them off, or set log_probs: raw for the engine with "
            "temperature 1"
        )
