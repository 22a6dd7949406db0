"""How vLLM is started: its environment, its arguments, and what it cannot compute."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.weights import AdapterFile, has_latent_attention, head_size_of, sizes_of
from rlinf.errors import ConfigError
from rlinf.scheduler.accelerators import detect_accelerators

_WORKER = "rlinf.engines.vllm.worker.WorkerMethods"
_PASS = 4096  # tokens of a forward pass on a CPU
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


def on_cpu() -> bool:
    """Whether this process sees no accelerator, so that vLLM computes on the host."""
    return detect_accelerators()[1] == 0


def engine_arguments(
    config: VLLMEngineConfig, path: Path, adapter: AdapterFile | None
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``.

    Args:
        config: The section of the engine.
        path: Directory of the model.
        adapter: What it serves on top of the model; None: nothing.
    """
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


def set_environment(config: VLLMEngineConfig) -> None:
    """What vLLM reads from the environment when it is imported; a user's own values stay."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Where it starts processes: a copy of this one would have locks of threads that it lacks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.cpu_cache_gib))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if config.devices_per_engine == 1 else {}),
    }.items():
        os.environ.setdefault(name, value)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process that it runs in."""
    state, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
    np.random.set_state(arrays)


def check_heads(path: Path) -> None:
    """Refuse a model for whose attention vLLM has no kernel on a CPU.

    It would say so in the first pass only, from a worker of its own.

    Raises:
        ConfigError: It is such a model.
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
