"""What both ways to run vLLM have in common.

Weights are replaced in place while nothing is computed. Sequences that run at that time are
preempted and their caches computed again, so nothing is scored under a mixture of weights. Seeds
are vLLM's: a sequence depends on its seed and not on its neighbours (up to rounding), but what is
continued after an abort draws other numbers than it would have drawn uninterrupted.
"""

from __future__ import annotations

import os
import pickle
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.data.sequences import StopReason
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.config import VLLMEngineConfig, local_directory
from rlinf.engines.process.weight_block import WeightBlock
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest, ModelSource
from rlinf.engines.requests import Unfinished, answer, given_tokens, stop_tokens, text_of
from rlinf.engines.weight_files import (
    AdapterFile,
    end_tokens_of,
    given_names,
    has_latent_attention,
    head_size_of,
    sizes_of,
)
from rlinf.errors import ConfigError
from rlinf.models.adapters import is_adapter
from rlinf.models.language import file_weights, without_weights
from rlinf.scheduler.accelerators import detect_accelerators

_WORKER = "rlinf.engines.vllm.worker.WorkerMethods"
_PASS = 4096  # tokens of a forward pass on a CPU
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
_ENVIRONMENT: dict[str, str] = {}  # what an engine of this process has set


@dataclass(eq=False)
class Growing:
    """What a request has so far: new tokens, log-probs and versions of the weights; the
    ``tokenizer`` is for stop texts that it began with."""

    request: GenerationRequest
    tokenizer: Any = None
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
        new = (self.tokens, self.log_probs, self.versions)
        return answer(self.request, *new, reason, tokenizer=self.tokenizer)


class VLLMBase(Engine):
    """Engine on the model directory of ``source.path``; a subclass starts vLLM."""

    def __init__(self, config: VLLMEngineConfig, source: ModelSource) -> None:
        if source.path is None:
            raise ConfigError("the engine `vllm` loads its model from a directory, none was given")
        self._config, self._path = config, local_directory(source.path)
        _set_environment(config)
        _check_heads(self._path)
        self._adapter = None if source.lora is None else AdapterFile(source.lora)
        self._arguments = _engine_arguments(config, self._path, self._adapter)
        self._end_tokens, self._tokenizer = end_tokens_of(self._path), source.tokenizer
        self._names = given_names(self._path)
        self._structure = without_weights(self._path)
        self._tied = False
        self._lora_request: Any = None
        self._block: WeightBlock | None = None
        self._running: Unfinished[Growing]
        self.version = 0

    def _started(self, model: Any) -> None:
        """Note what vLLM says of the model, by its ``ModelConfig``."""
        self._tied = bool(model.hf_config.tie_word_embeddings)
        self._running = Unfinished(
            context=int(model.max_model_len), vocabulary=int(model.get_vocab_size())
        )

    @property
    def unfinished(self) -> int:
        """See :attr:`Engine.unfinished`."""
        return len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        self._running.check(request)
        if request.scored:
            self._config.check_scored(request.sampling)
        if request.sampling.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        growing = Growing(request, self._tokenizer)
        prompt = {"prompt_token_ids": text_of(request).tolist()}
        self._add(growing, prompt, _sampling_parameters(request, self._end_tokens))
        self._running[request.request_id] = growing

    @abstractmethod
    def _add(self, growing: Growing, prompt: dict[str, Any], parameters: Any) -> None:
        """Give a request to vLLM."""

    def progress(self) -> dict[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        return {number: len(growing) for number, growing in self._running.items()}

    # -- weights ---------------------------------------------------------------------------------

    def _checked(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights of the whole model by the names of its files; a ValueError unless all are."""
        given = file_weights(self._structure, given)
        if not given:
            raise ValueError("no weights were given, and vLLM shares none with a trainer")
        if any(map(is_adapter, given)):
            raise ValueError("the tensors of an adapter were given to an engine without one")
        if self._names is None:
            self._names = set(given)
        optional = {"lm_head.weight"} if self._tied else set()
        for title, names in (
            ("unknown to", given.keys() - self._names - optional),
            ("missing for", self._names - given.keys() - optional),
        ):
            if names:
                raise ValueError(f"{len(names)} weights are {title} the model, as {min(names)}")
        return given

    def _shared(self, given: dict[str, torch.Tensor]) -> bytes:
        """Put weights where other processes find them; returns the address, pickled."""
        if self._block is not None and self._block.fits(given):
            self._block.write(given)
        else:
            self._close_block()
            self._block = WeightBlock(given)
        return pickle.dumps(self._block.address)

    def _close_block(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    @property
    def _sleep_level(self) -> int:
        """With an adapter the base is kept in host memory: no update brings it again."""
        return 2 if self._adapter is None else 1

    def _written_adapter(self, given: dict[str, torch.Tensor]) -> Any:
        """Write the tensors of the adapter to its file; returns the order to load it in place.

        The first ones must come before the first request, which would run without them.
        """
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        if self._running and self._lora_request is None:
            raise RuntimeError("the first adapter must come before the first request")
        folder = self._adapter.write(given)
        self._lora_request = LoRARequest("policy", 1, str(folder))
        return LoRARequest("policy", 1, str(folder), load_inplace=True)


# -- how vLLM is started: its environment, its arguments, and what it cannot compute -------------


def on_cpu() -> bool:
    """Whether this process sees no accelerator, so that vLLM computes on the host."""
    return detect_accelerators()[1] == 0


@contextmanager
def random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process that it runs in."""
    state, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
    np.random.set_state(arrays)


def _engine_arguments(
    config: VLLMEngineConfig, path: Path, adapter: AdapterFile | None
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``."""
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
        "enable_sleep_mode": not on_cpu(),
        # Within the calls of the caller a step must have ended when it returns: its tokens carry
        # the version of that moment. The background computes the same way.
        "async_scheduling": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "seed": 0,
    }
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if on_cpu():
        # A part of a prompt gives no token, and vLLM then turns back the sequence's generator,
        # which generators on a CPU cannot do. Without parts a whole text must fit into a pass.
        longest = config.max_model_len or sizes_of(path)[1] or _PASS
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens or _PASS, longest)
    if adapter is not None:
        rank = next((rank for rank in _RANKS if rank >= adapter.lora.rank), adapter.lora.rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    return {**arguments, **config.options}


def _set_environment(config: VLLMEngineConfig) -> None:
    """What vLLM reads from the environment; values of a user stay, those of another engine not."""
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Where it starts processes: a copy of this one would have locks of threads that it lacks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.cpu_cache_gib))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if config.devices_per_engine == 1 else {}),
    }
    for name, ours in list(_ENVIRONMENT.items()):
        if os.environ.get(name) == ours:
            del os.environ[name], _ENVIRONMENT[name]
    for name, value in values.items():
        if name not in os.environ:
            os.environ[name] = _ENVIRONMENT[name] = value


def _check_heads(path: Path) -> None:
    """Refuse, by a ConfigError, a model for whose attention vLLM has no kernel on a CPU.

    It would say so in the first pass only, from a worker of its own.
    """
    if not on_cpu():
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


# -- requests in vLLM's words --------------------------------------------------------------------


def _sampling_parameters(request: GenerationRequest, end_tokens: Sequence[int]) -> Any:
    """The ``SamplingParams`` of a request; what it begins with counts for its lengths."""
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
