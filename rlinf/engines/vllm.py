"""vLLM, in the process of the caller, on CUDA or CPU.

Weights are replaced in place between two steps. Sequences that run at that time are preempted and
their caches computed again, so nothing is scored under a mixture of weights. Seeds are vLLM's: a
sequence depends on its seed and not on its neighbours (up to rounding), but what is continued after
an abort draws other numbers than it would have drawn uninterrupted.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.data.sequences import StopReason
from rlinf.engines.config import SamplingConfig, VLLMEngineConfig, local_directory
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    ModelSource,
    Weights,
)
from rlinf.engines.requests import Unfinished, answer, given_tokens, text_of
from rlinf.engines.weights import (
    AdapterFile,
    end_tokens_of,
    given_names,
    has_latent_attention,
    head_size_of,
    sizes_of,
)
from rlinf.errors import ConfigError
from rlinf.models.adapters import is_adapter
from rlinf.models.file_format import file_weights, without_weights

_WORKER = "rlinf.engines.vllm_worker.WeightUpdate"
_PASS = 4096  # tokens of a forward pass on a CPU
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


@dataclass
class _Progress:
    """What a request has so far."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def finished(self, reason: StopReason) -> FinishedCompletion:
        return answer(self.request, self.tokens, self.log_probs, self.versions, reason)


class VLLMEngine(Engine):
    """Engine on the model directory of ``source.path``."""

    def __init__(self, config: VLLMEngineConfig, source: ModelSource) -> None:
        if source.path is None:
            raise ConfigError("the engine `vllm` loads its model from a directory, none was given")
        self._config, self._path = config, local_directory(source.path)
        _set_environment(config)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        _check_heads(self._path)
        self._adapter = None if source.lora is None else AdapterFile(source.lora)
        self._foreign_group = torch.distributed.is_initialized()
        with _random_state_kept():
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(**_arguments(config, self._path, self._adapter))
            )
        model = self._engine.model_config
        self._end_tokens = end_tokens_of(self._path)
        self._names = given_names(self._path)
        self._structure = without_weights(self._path)
        self._lora_request: Any = None
        self._running: Unfinished[_Progress] = Unfinished(
            context=int(model.max_model_len), vocabulary=int(model.get_vocab_size())
        )
        self.version = 0

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and neither returned nor aborted."""
        return len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        self._running.check(request)
        _check_scored(request.sampling, self._config)
        self._engine.add_request(
            str(request.request_id),
            {"prompt_token_ids": text_of(request).tolist()},
            self._parameters(request),
            lora_request=self._lora_request,
        )
        self._running[request.request_id] = _Progress(request)

    def step(self) -> list[FinishedCompletion]:
        """One step of vLLM's scheduler."""
        finished: list[FinishedCompletion] = []
        if not self._running:
            return finished
        for output in self._engine.step():
            number = int(output.request_id)
            if number not in self._running:
                continue
            progress = self._running[number]
            part = output.outputs[0]
            progress.tokens.extend(part.token_ids)
            for token, options in zip(part.token_ids, part.logprobs, strict=True):
                progress.log_probs.append(options[token].logprob)
            progress.versions.extend([self.version] * len(part.token_ids))
            if output.finished:
                self._running.pop(number)
                finished.append(progress.finished(part.finish_reason))
        return finished

    def progress(self) -> dict[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        known = {number: self._running[number] for number in self._running}
        return {n: given_tokens(p.request) + len(p.tokens) for n, p in known.items()}

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        chosen = self._running.chosen(request_ids)
        self._engine.abort_request([str(number) for number in chosen])
        return [self._running.pop(number).finished("abort") for number in chosen]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`.

        With an adapter the first one must come before the first request.
        """
        given = dict(weights)
        if self._adapter is not None:
            self._replace_adapter(given)
        else:
            given = file_weights(self._structure, given)
            self._check_names(given)
            self._engine.collective_rpc("replace_weights", args=(self._portable(given),))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop the caches of the former weights")
        self.version = version

    def release_memory(self) -> None:
        """Give weights and caches back; on CPU vLLM keeps both, and only forgets its prefixes."""
        self._running.require_none()
        self._engine.reset_prefix_cache()
        if torch.cuda.is_available():
            self._engine.sleep(level=2)

    def restore_memory(self) -> None:
        """Take the memory again; on CUDA :meth:`update_weights` must follow."""
        if torch.cuda.is_available():
            self._engine.wake_up()

    def close(self) -> None:
        """End vLLM's workers and its process groups, so that another engine can be built."""
        if self._engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel

        self._running.clear()
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        if self._foreign_group:
            destroy_model_parallel()  # and leave the process group to who made it
        else:
            cleanup_dist_env_and_memory()

    def _parameters(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, done = request.sampling, given_tokens(request)
        stops = self._end_tokens if sampling.stop_token_ids is None else sampling.stop_token_ids
        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_new_tokens - done,
            min_tokens=max(sampling.min_new_tokens - done, 0),
            stop_token_ids=list(stops),
            stop=list(sampling.stop),
            ignore_eos=True,
            seed=_seed(request.seed, done),
            logprobs=0,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _check_names(self, given: dict[str, torch.Tensor]) -> None:
        if not given:
            raise ValueError("no weights were given, and vLLM shares none with a trainer")
        if any(map(is_adapter, given)):
            raise ValueError("the tensors of an adapter were given to an engine without one")
        if self._names is None:
            self._names = set(given)
        tied = self._engine.model_config.hf_config.tie_word_embeddings
        optional = {"lm_head.weight"} if tied else set()
        for title, names in (
            ("unknown to", given.keys() - self._names - optional),
            ("missing for", self._names - given.keys() - optional),
        ):
            if names:
                raise ValueError(f"{len(names)} weights are {title} the model, as {min(names)}")

    def _portable(self, given: dict[str, torch.Tensor]) -> list[tuple[str, Any]]:
        """By reference within the process, as arrays to other ones (which have no bfloat16)."""
        if self._config.tensor_parallel_size * self._config.pipeline_parallel_size == 1:
            return [(name, value.detach()) for name, value in given.items()]
        return [(name, value.detach().float().cpu().numpy()) for name, value in given.items()]

    def _replace_adapter(self, given: dict[str, torch.Tensor]) -> None:
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        if self._running and self._lora_request is None:
            raise RuntimeError("the first adapter must come before the first request")
        folder = self._adapter.write(given)
        self._engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        self._lora_request = LoRARequest("policy", 1, str(folder))


def _seed(seed: int, done: int) -> int:
    """The seed of a request, another one for what is continued: equal numbers would repeat."""
    if not done:
        return seed % 2**63
    return int(np.random.SeedSequence((seed, done)).generate_state(1, np.uint64)[0] >> 1)


def _check_scored(sampling: SamplingConfig, config: VLLMEngineConfig) -> None:
    """Refuse what vLLM would score otherwise than softmax(logits / temperature)."""
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


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process that it runs in."""
    state, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
    np.random.set_state(arrays)


def _set_environment(config: VLLMEngineConfig) -> None:
    """What vLLM reads from the environment when it is imported; a user's own values stay."""
    alone = config.tensor_parallel_size * config.pipeline_parallel_size == 1
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.cpu_cache_gib))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if alone else {}),
    }.items():
        os.environ.setdefault(name, value)


def _check_heads(path: Path) -> None:
    """Raises ConfigError where vLLM has no kernel for the attention of the model on a CPU.

    It would say so in the first pass only, from a worker of its own.
    """
    if torch.cuda.is_available():
        return
    if has_latent_attention(path):
        raise ConfigError(
            "the engine `vllm` computes latent attention (DeepSeek) wrongly on a CPU; use the "
            "engine `hf`, or another model"
        )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, legal = head_size_of(path), CPUAttentionBackend.get_supported_head_sizes()
    if size not in legal:
        raise ConfigError(
            f"the engine `vllm` has no kernel for attention heads of {size} numbers on a CPU; "
            f"it has for {', '.join(map(str, legal))}; use the engine `hf`, or another model"
        )


def _arguments(config: VLLMEngineConfig, path: Path, adapter: AdapterFile | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": config.dtype,
        "max_num_seqs": config.max_running_requests,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "load_format": "safetensors" if config.load_format == "auto" else config.load_format,
        "logprobs_mode": f"{config.log_probs}_logprobs",
        "worker_extension_cls": _WORKER,
        "enable_sleep_mode": torch.cuda.is_available(),
        # A step must have ended when it returns: its tokens carry the version of that moment.
        "async_scheduling": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "seed": 0,
    }
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if not torch.cuda.is_available():
        # A part of a prompt gives no token, and vLLM then turns back the sequence's generator,
        # which generators on a CPU cannot do. Without parts a whole text must fit into a pass.
        longest = config.max_model_len or sizes_of(path)[1] or _PASS
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens or _PASS, longest)
    if adapter is not None:
        rank = next((rank for rank in _RANKS if rank >= adapter.lora.rank), adapter.lora.rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    return {**arguments, **config.options}
