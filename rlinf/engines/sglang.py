"""SGLang's engine. Written against its public interface and not run: it needs CUDA, which the
machines that this project is tested on lack. Run the conformance suite before relying on it.

SGLang generates in processes of its own, all the time, and not step by step. A step here waits for
what ends within a moment. At an update of the weights all sequences are aborted, and continued
under the new weights from the tokens that they had; so each token is scored under one version.

A sequence that may end at a token ends at the model's own end tokens, too: SGLang ignores either
all such tokens or none. Where a request does not end at these, it is continued in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.data.sequences import Completion, StopReason
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.config import SGLangEngineConfig, local_directory
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    ModelSource,
    Weights,
)
from rlinf.engines.requests import Unfinished, answer, given_tokens, stop_tokens, text_of
from rlinf.engines.weight_files import end_tokens_of, sizes_of
from rlinf.errors import ConfigError, RunFailure
from rlinf.models.language import file_weights, without_weights

_MOMENT = 0.05
"""Seconds that a step waits for a sequence to end."""


@dataclass
class _Flight:
    """A request that SGLang works on, and its answer to come."""

    request: GenerationRequest
    answer: asyncio.Future[dict[str, Any]]
    name: str


class SGLangEngine(Engine):
    """Engine on the model directory of ``source.path``; adapters arrive merged.

    Seeds are passed on; SGLang obeys them with the option ``enable_deterministic_inference``.
    """

    def __init__(self, config: SGLangEngineConfig, source: ModelSource) -> None:
        if source.path is None:
            raise ConfigError(
                "the engine `sglang` loads its model from a directory, none was given"
            )
        if source.lora is not None:
            raise ConfigError("the engine `sglang` takes adapters merged into the weights only")
        import sglang

        self._config = config
        self._path = path = local_directory(source.path)
        vocabulary, context = sizes_of(path)
        self._end_tokens, self._tokenizer = end_tokens_of(path), source.tokenizer
        self._structure = without_weights(path)
        self._engine: Any = sglang.Engine(
            model_path=str(path),
            dtype=config.dtype,
            tp_size=config.tensor_parallel_size,
            max_running_requests=config.max_running_requests,
            mem_fraction_static=config.mem_fraction_static,
            attention_backend=config.attention_backend,
            disable_cuda_graph=config.disable_cuda_graph,
            cuda_graph_max_bs=config.cuda_graph_max_bs,
            enable_memory_saver=config.enable_memory_saver,
            **config.options,
        )
        self._flights: Unfinished[_Flight] = Unfinished(context=context, vocabulary=vocabulary)
        self._sent = 0
        self.version = 0

    @property
    def unfinished(self) -> int:
        """See :attr:`Engine.unfinished`."""
        return len(self._flights)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        self._flights.check(request)
        self._config.check_served(request.sampling)
        if request.scored:
            self._config.check_scored(request.sampling)
        if request.sampling.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        self._send(request)

    def step(self) -> list[FinishedCompletion]:
        """Wait a moment for sequences to end."""
        if not self._flights:
            return []
        answers = [flight.answer for flight in self._flights.values()]
        self._engine.loop.run_until_complete(
            asyncio.wait(answers, timeout=_MOMENT, return_when=asyncio.FIRST_COMPLETED)
        )
        ended = {n: flight for n, flight in self._flights.items() if flight.answer.done()}
        landed = {number: self._land(number) for number in ended}
        for number, flight in ended.items():
            completion = landed[number].completion
            if self._ended_early(flight) and completion.stop_reason == "abort":
                del landed[number]
                self._send(replace(flight.request, partial=completion))
        return list(landed.values())

    def progress(self) -> dict[int, int]:
        """Refused by a ConfigError: SGLang gives a sequence when it has ended."""
        raise ConfigError("sglang does not tell how long unfinished answers are", key="type")

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`.

        One that ended by itself meanwhile is returned with the reason for that.
        """
        chosen = self._flights.chosen(request_ids)
        if not chosen:
            return []
        for number in chosen:
            self._engine.tokenizer_manager.abort_request(rid=self._flights[number].name)
        answers = [self._flights[number].answer for number in chosen]
        self._engine.loop.run_until_complete(asyncio.wait(answers))
        return [self._land(number) for number in chosen]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`."""
        whole = {name: value.detach() for name, value in weights}
        given = list(file_weights(self._structure, whole).items())
        if not given:
            raise ValueError("no weights were given, and SGLang shares none with a trainer")
        requests = {number: flight.request for number, flight in self._flights.items()}
        landed = self.abort()
        reply = self._engine.update_weights_from_tensor(given, flush_cache=True)
        if not getattr(reply, "success", reply[0] if isinstance(reply, tuple) else True):
            raise RunFailure(f"SGLang did not take the weights: {reply}")
        self.version = version
        for item in landed:
            request = requests[item.request_id]
            if item.completion.stop_reason == "abort":
                partial = item.completion if len(item.completion) else None
                self._send(replace(request, partial=partial))
            else:
                self._keep(request, item.completion)

    def release_memory(self) -> None:
        """Give weights and caches back; needs ``enable_memory_saver``."""
        self._flights.require_none()
        self._engine.flush_cache()
        self._engine.release_memory_occupation()

    def restore_memory(self) -> None:
        """Take the memory again; :meth:`update_weights` must follow."""
        self._engine.resume_memory_occupation()

    def close(self) -> None:
        """End SGLang's processes."""
        self._flights.clear()
        self._engine.shutdown()

    def _send(self, request: GenerationRequest) -> None:
        self._sent += 1
        name = f"rlinf-{self._sent}"
        coming = self._engine.async_generate(
            input_ids=text_of(request).tolist(),
            sampling_params=_parameters(request, given_tokens(request), self._end_tokens),
            return_logprob=True,
            rid=name,
        )
        task = self._engine.loop.create_task(coming)
        self._flights[request.request_id] = _Flight(request, task, name)

    def _keep(self, request: GenerationRequest, completion: Completion) -> None:
        """A sequence that ended just when it was to be interrupted: the next step returns it."""
        coming: asyncio.Future[dict[str, Any]] = self._engine.loop.create_future()
        coming.set_result({"meta_info": {"finish_reason": {"type": completion.stop_reason}}})
        kept = replace(request, partial=completion)
        self._flights[request.request_id] = _Flight(kept, coming, "")

    def _land(self, number: int) -> FinishedCompletion:
        flight = self._flights.pop(number)
        about = flight.answer.result()["meta_info"]
        scored = about.get("output_token_logprobs") or []
        reasons: dict[str, StopReason] = {"stop": "stop", "length": "length"}
        reason = reasons.get(about["finish_reason"]["type"], "abort")
        return answer(
            flight.request,
            tokens=[entry[1] for entry in scored],
            log_probs=[entry[0] for entry in scored],
            versions=[self.version] * len(scored),
            reason="abort" if self._ended_early(flight) else reason,
            tokenizer=self._tokenizer,
        )

    def _ended_early(self, flight: _Flight) -> bool:
        """Whether SGLang ended a sequence at a token that does not end its request."""
        matched = flight.answer.result()["meta_info"]["finish_reason"].get("matched")
        stops = stop_tokens(flight.request, self._end_tokens)
        return isinstance(matched, int) and matched not in stops


def _parameters(request: GenerationRequest, done: int, ends: tuple[int, ...]) -> dict[str, Any]:
    sampling, stops = request.sampling, stop_tokens(request, ends)
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_new_tokens - done,
        "min_new_tokens": max(sampling.min_new_tokens - done, 0),
        "stop_token_ids": list(stops),
        "stop": list(sampling.stop),
        "ignore_eos": not stops,  # which SGLang obeys for `stop_token_ids`, too
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": (request.seed + done * 0x9E3779B1) % 2**31,
    }
