"""vLLM in the process of the caller: it computes within the calls alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.protocol import FinishedCompletion, ModelSource, Weights
from rlinf.engines.vllm.base import Growing, VLLMBase, on_cpu, random_state_kept


class VLLMEngine(VLLMBase):
    """vLLM's ``LLMEngine``; see :class:`~rlinf.engines.vllm.base.VLLMBase`."""

    def __init__(self, config: VLLMEngineConfig, source: ModelSource) -> None:
        super().__init__(config, source)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._foreign_group = torch.distributed.is_initialized()
        with random_state_kept():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
        self._started(self._engine.model_config)

    def _add(self, growing: Growing, prompt: dict[str, Any], parameters: Any) -> None:
        number = str(growing.request.request_id)
        self._engine.add_request(number, prompt, parameters, lora_request=self._lora_request)

    def step(self) -> list[FinishedCompletion]:
        """One step of vLLM's scheduler."""
        finished: list[FinishedCompletion] = []
        if not self._running:
            return finished
        for output in self._engine.step():
            number = int(output.request_id)
            if number not in self._running:
                continue
            growing = self._running[number]
            part = output.outputs[0]
            growing.versions.extend([self.version] * growing.add(part))
            if output.finished:
                self._running.pop(number)
                finished.append(growing.finished(part.finish_reason))
        return finished

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
            self._engine.add_lora(self._written_adapter(given))
        else:
            self._replace(self._checked(given))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop the caches of the former weights")
        self.version = version

    def _replace(self, given: dict[str, torch.Tensor]) -> None:
        if self._config.devices_per_engine == 1:
            pairs = [(name, value.detach()) for name, value in given.items()]
            self._engine.collective_rpc("replace_weights", args=(pairs,))
        else:
            self._engine.collective_rpc("replace_weights_by", args=(self._shared(given),))

    def release_memory(self) -> None:
        """Give weights and caches back; on CPU vLLM keeps both, and only forgets its prefixes."""
        self._running.require_none()
        self._engine.reset_prefix_cache()
        if not on_cpu():
            self._engine.sleep(level=self._sleep_level)

    def restore_memory(self) -> None:
        """Take the memory again; on CUDA :meth:`update_weights` must follow."""
        if not on_cpu():
            self._engine.wake_up()

    def close(self) -> None:
        """End vLLM's workers and its process groups, so that another engine can be built."""
        if self._engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel

        self._running.clear()
        self._engine.engine_core.shutdown()
        self._engine = None
        self._close_block()
        gc.collect()
        if self._foreign_group:
            destroy_model_parallel()  # and leave the process group to who made it
        else:
            cleanup_dist_env_and_memory()
