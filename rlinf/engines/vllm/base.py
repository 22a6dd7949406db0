"""What both ways to run vLLM have in common.

Weights are replaced in place while nothing is computed. Sequences that run at that time are
preempted and their caches computed again, so nothing is scored under a mixture of weights. Seeds
are vLLM's: a sequence depends on its seed and not on its neighbours (up to rounding), but what is
continued after an abort draws other numbers than it would have drawn uninterrupted.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from typing import Any

import torch

from rlinf.engines.config import VLLMEngineConfig, local_directory
from rlinf.engines.process.weight_block import WeightBlock
from rlinf.engines.protocol import Engine, GenerationRequest, ModelSource
from rlinf.engines.requests import Unfinished, text_of
from rlinf.engines.vllm.arguments import check_heads, engine_arguments, set_environment
from rlinf.engines.vllm.requests import Growing, check_scored, sampling_parameters
from rlinf.engines.weights import AdapterFile, end_tokens_of, given_names
from rlinf.errors import ConfigError
from rlinf.models.adapters import is_adapter
from rlinf.models.language import file_weights, without_weights


class VLLMBase(Engine):
    """Engine on the model directory of ``source.path``; a subclass starts vLLM.

    Raises:
        ConfigError: There is no directory, or vLLM cannot compute with the model.
    """

    def __init__(self, config: VLLMEngineConfig, source: ModelSource) -> None:
        if source.path is None:
            raise ConfigError("the engine `vllm` loads its model from a directory, none was given")
        self._config, self._path = config, local_directory(source.path)
        set_environment(config)
        check_heads(self._path)
        self._adapter = None if source.lora is None else AdapterFile(source.lora)
        self._arguments = engine_arguments(config, self._path, self._adapter)
        self._end_tokens = end_tokens_of(self._path)
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
        """Requests that were submitted and neither returned nor aborted."""
        return len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        self._running.check(request)
        check_scored(request.sampling, self._config)
        growing = Growing(request)
        prompt = {"prompt_token_ids": text_of(request).tolist()}
        self._add(growing, prompt, sampling_parameters(request, self._end_tokens))
        self._running[request.request_id] = growing

    @abstractmethod
    def _add(self, growing: Growing, prompt: dict[str, Any], parameters: Any) -> None:
        """Give a request to vLLM."""

    def progress(self) -> dict[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        return {number: len(self._running[number]) for number in self._running}

    # -- weights ---------------------------------------------------------------------------------

    def _checked(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights of the whole model by the names of its files.

        Raises:
            ValueError: A name is unknown or missing.
        """
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

    def _written_adapter(self, given: dict[str, torch.Tensor]) -> Any:
        """Write the tensors of the adapter to its file; returns the order to load it in place.

        Raises:
            RuntimeError: It is the first one, and requests run without it.
            ValueError: A name is unknown or missing.
        """
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        if self._running and self._lora_request is None:
            raise RuntimeError("the first adapter must come before the first request")
        folder = self._adapter.write(given)
        self._lora_request = LoRARequest("policy", 1, str(folder))
        return LoRARequest("policy", 1, str(folder), load_inplace=True)
