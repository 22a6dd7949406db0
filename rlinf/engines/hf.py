"""Continuous batching over a transformers model, in the caller's process.

Sequences join and leave the running batch between steps, so that a long one is never waited for.
Equal prompts are computed once. Attention is over what each sequence has, not over the longest.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.pictures import PictureReader
from rlinf.data.sequences import StopReason
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines import ragged_attention
from rlinf.engines.config import HFEngineConfig, local_directory
from rlinf.engines.decoder import Decoder
from rlinf.engines.prefill import Begun, Prompts, require_served
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    KeptCache,
    ModelSource,
    Weights,
)
from rlinf.engines.requests import (
    Unfinished,
    answer,
    ends_with_text,
    given_tokens,
    stop_tokens,
    text_reach,
)
from rlinf.engines.running import Running
from rlinf.engines.sampling import draw_tokens
from rlinf.engines.weight_files import adopt_weights, assign_weights
from rlinf.errors import ConfigError
from rlinf.models.language import architecture_class, saved_buffers
from rlinf.models.vision_language import set_text_attention, vision_of
from rlinf.scheduler.accelerators import AcceleratorUtil
from rlinf.scheduler.process import own_device

_READ = {"cpu": 1024}
"""Tokens of interrupted sequences that are read before the next decoding step, by device, where
measured: a worker that takes over many others' would be silent for long."""
_CARRIED = ("cpu",)
"""Devices, where measured, from which caches go along with interrupted sequences."""


class HFEngine(Engine):
    """Engine on the model of ``source.module``, or of ``source.path``.

    A shared module is not changed: the engine uses a second set of layers around the *same*
    parameters (unless ``dtype`` differs from the module's), so that a trainer's mode, gradient
    checkpointing and attention are left alone, and its optimizer steps are seen here at once.
    Call ``update_weights((), version)`` after such a step.

    A sequence is a function of weights, prompt, seed and sampling, up to rounding; with
    ``deterministic`` to the last bit.
    """

    continues_exactly = True

    def __init__(self, config: HFEngineConfig, source: ModelSource) -> None:
        self._config = config
        self._model, self._shared = serving_model(config, source)
        self.keeps_stale_caches = config.on_update == "keep"
        self.carries_caches = self._model.device.type in _CARRIED
        self._tokenizer, self._path = source.tokenizer, source.path
        self._end_tokens = end_tokens(self._model)
        text = self._model.config.get_text_config()
        context, vocabulary = getattr(text, "max_position_embeddings", None), int(text.vocab_size)
        self._unfinished: Unfinished[None] = Unfinished(context=context, vocabulary=vocabulary)
        self._waiting: deque[GenerationRequest] = deque()
        self._running = Running(config.max_running_requests, vocabulary, self._model.device)
        self._prompts = Prompts(self._model, config)
        self._reads_pictures = vision_of(self._model) is not None
        self._decoder = Decoder(self._model, config)
        self._cache = self._decoder.cache
        self.version = 0

    @property
    def unfinished(self) -> int:
        """See :attr:`Engine.unfinished`."""
        return len(self._unfinished)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        self._unfinished.check(request, pictures=self._reads_pictures)
        if (request.sampling.stop or request.pictures) and self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._path)
        if request.pictures and self._prompts.reader is None:
            self._prompts.reader = self._picture_reader()
        self._unfinished[request.request_id] = None
        self._prompts.expect(request)
        self._waiting.append(request)

    def step(self) -> list[FinishedCompletion]:
        """One token for every running sequence; waiting requests fill the free places first."""
        if not self._unfinished:
            return []
        with torch.inference_mode():
            fresh = self._admit()
            decoding = len(self._running) - len(fresh)
            logits = [*self._decoder.decode(self._running.active[:decoding]), *fresh]
            tokens, log_probs = self._draw(logits)
        stopped = self._running.append(tokens, log_probs, self.version)
        return self._finish(stopped)

    def progress(self) -> dict[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        running = zip(self._running.requests, self._running.lengths().tolist(), strict=True)
        found = {request.request_id: length for request, length in running}
        return found | {request.request_id: given_tokens(request) for request in self._waiting}

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        chosen = set(self._unfinished.chosen(request_ids))
        running = enumerate(self._running.requests)
        rows = [row for row, request in running if request.request_id in chosen]
        aborted = self._collect(dict.fromkeys(rows, "abort"))
        for request in [each for each in self._waiting if each.request_id in chosen]:
            aborted.append(answer(request, (), (), (), "abort"))
            self._prompts.forget(request)
            self._unfinished.pop(request.request_id)
        self._waiting = deque(r for r in self._waiting if r.request_id in self._unfinished)
        return aborted

    def interrupt(self) -> list[FinishedCompletion]:
        """End all requests, with what was computed of them; see :meth:`Engine.interrupt`."""
        caches = {request.request_id: request.cache for request in self._waiting}
        if self.carries_caches:
            for row, request in enumerate(self._running.requests):
                caches[request.request_id] = self._kept(row)
        return [replace(item, cache=caches.get(item.request_id)) for item in self.abort()]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`."""
        assign_weights(self._model, weights, may_be_empty=self._shared)
        self._begin_version(version)

    def adopt_weights(self, weights: Weights, version: int) -> None:
        """Compute with these tensors; see :meth:`Engine.adopt_weights`."""
        self._shared = adopt_weights(self._model, weights)
        self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        """Forget what was computed under the former weights, and compute it again."""
        self.version = version
        self._prompts.drop()
        if self._config.on_update == "recompute" and len(self._running):
            texts = [self._running.cached_text(row) for row in range(len(self._running))]
            with torch.inference_mode():
                self._cache.replace(self._prompts.read(texts, [False] * len(texts)))

    def release_memory(self) -> None:
        """Give the caches back, and on an accelerator the weights if they are the engine's own."""
        self._unfinished.require_none()
        self._cache.clear()
        self._prompts.drop()
        if not self._shared:
            self._device = self._model.device
            self._model.to("cpu")
            AcceleratorUtil.empty_cache(self._device)

    def restore_memory(self) -> None:
        """Bring the engine's own weights back; caches are allocated when needed."""
        if not self._shared:
            self._model.to(self._device)

    def _picture_reader(self) -> PictureReader:
        if self._path is None:
            raise ConfigError("pictures are read by the files of the model, and it has none")
        return PictureReader(self._path, self._tokenizer)

    def close(self) -> None:
        """Give the caches back."""
        self._cache.clear()
        self._prompts.drop()
        self._waiting.clear()
        self._unfinished.clear()

    def _admit(self) -> list[Tensor]:
        """Start waiting requests; returns the logits [V] of those that have no token yet.

        Those that have some, from an earlier abort, take the rows before them.
        """
        begun = sorted(self._next_waiting(), key=lambda item: not item[1])
        if not begun:
            return []
        results = self._prompts.compute(begun)
        columns = max(len(r.prompt_tokens) + r.sampling.max_new_tokens for r, _ in begun)
        self._cache.add(len(self._running), results, columns)
        for request, drawn in begun:
            cached = len(request.prompt_tokens) + max(drawn - 1, 0)
            self._running.add(
                replace(request, cache=None),  # which would hold its memory to the end
                stop_tokens(request, self._end_tokens),
                cached=cached,
                drawn=drawn,
            )
            self._prompts.forget(request)
        logits = [result.logits for result in results]
        return [row for row in logits if row is not None]

    def _next_waiting(self) -> Iterator[Begun]:
        """Requests that fill the free places, as far as there is time to read them."""
        most, read = _READ.get(self._model.device.type, sys.maxsize), 0
        for _ in range(self._config.max_running_requests - len(self._running)):
            if not self._waiting or read >= most:
                return
            request = self._waiting.popleft()
            if request.cache is not None and request.cache.version != self.version:
                request = replace(request, cache=None)
            drawn = self._drawn(request)
            if drawn and request.cache is None:
                read += len(request.prompt_tokens) + drawn
            yield request, drawn

    def _drawn(self, request: GenerationRequest) -> int:
        """Tokens of a partial completion that are read like a prompt, or carried.

        The deterministic mode decodes again what the present weights sampled, as reading rounds
        otherwise than decoding: only what was read after the last update is read here too.
        """
        if request.cache is not None:
            return request.cache.tokens - len(request.prompt_tokens) + 1
        if request.partial is None or not self._config.deterministic:
            return given_tokens(request)
        return int((request.partial.versions != self.version).sum())

    def _draw(self, logits: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [n] of all running sequences; each row's depend on the row alone."""
        rows = torch.cat([part if part.dim() == 2 else part[None] for part in logits])
        draw = self._running.how_to_draw(np.arange(len(rows)))
        tokens, log_probs = draw_tokens(rows, draw)
        return tokens.cpu().numpy(), log_probs.cpu().numpy()

    def _finish(self, stopped: np.ndarray) -> list[FinishedCompletion]:
        """Take out what ended, and put the rest in order when that pays."""
        active = self._running.active
        full = np.flatnonzero(active["count"] >= active["limit"]).tolist()
        reasons: dict[int, StopReason] = dict.fromkeys(full, "length")
        for row, request in enumerate(self._running.requests):
            if request.sampling.stop and self._ends_with_text(row, request):
                reasons[row] = "stop"
        reasons |= dict.fromkeys(np.flatnonzero(stopped).tolist(), "stop")
        finished = self._collect(reasons)
        order = self._decoder.order(self._running.active["cached"])
        if order is not None:
            self._running.reorder(order)
        return finished

    def _collect(self, reasons: dict[int, StopReason]) -> list[FinishedCompletion]:
        """Take rows out of the batch and return what they have."""
        if not reasons:
            return []
        finished = []
        for row, reason in reasons.items():
            request = self._running.requests[row]
            wanted = reason == "stop" and request.keep_cache and self.carries_caches
            finished.append(
                FinishedCompletion(
                    request_id=request.request_id,
                    completion=self._running.completion(row, reason),
                    cache=self._kept(row) if wanted else None,
                )
            )
        columns = int(self._running.active["cached"].max())
        source, target = self._running.remove(np.fromiter(reasons, np.int64, len(reasons)))
        self._cache.move(source, target, columns)
        for item in finished:
            self._unfinished.pop(item.request_id)
        return finished

    def _kept(self, row: int) -> KeptCache:
        return self._cache.kept(row, int(self._running.active["cached"][row]), self.version)

    def _ends_with_text(self, row: int, request: GenerationRequest) -> bool:
        """Whether a stop text was completed by the last token."""
        numbers = self._running.active[row]
        if numbers["count"] < max(numbers["minimum"], numbers["known"] + 1):
            return False
        stop = request.sampling.stop
        return ends_with_text(self._running.tail(row, text_reach(stop)), stop, self._tokenizer)


def serving_model(config: HFEngineConfig, source: ModelSource) -> tuple[Any, bool]:
    """The layers to compute with, and whether their parameters are those of ``source.module``."""
    if source.module is None:
        if source.path is None or source.lora is not None:
            wanted = "a module with its adapter" if source.lora else "a module or a directory"
            raise ConfigError(f"the engine `hf` needs {wanted}")
        model, shared = _load(config, source).to(own_device()), False
    else:
        module = source.module
        wanted = module.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        shared = source.shared and wanted == module.dtype
        model = module if wanted == module.dtype else _converted(module, wanted)
        if shared:
            model = _second_layers(module)
        elif not source.shared:
            model = model.to(own_device())
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        other = ", ".join(sorted(kinds - {"full_attention"}))
        raise ConfigError(
            f"the model has layers with {other}, the engine `hf` computes full_attention only; "
            "use the engine `vllm`",
            key="type",
        )
    ragged_attention.register()
    set_text_attention(model, ragged_attention.NAME)
    require_served(model.eval())
    return model, shared


def _second_layers(module: nn.Module) -> Any:
    """A copy of the module tree around the same parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _converted(module: nn.Module, dtype: torch.dtype) -> Any:
    """A copy with weights of another type.

    What is no weight keeps its type, as when the model is loaded so: rounded rotary frequencies
    would turn distant tokens by other angles.
    """
    converted = copy.deepcopy(module).to(dtype)
    saved = dict(saved_buffers(module))
    for name, buffer in module.named_buffers():
        if name not in saved:
            owner, _, own_name = name.rpartition(".")
            converted.get_submodule(owner).register_buffer(own_name, buffer.clone(), False)
    return converted


def _load(config: HFEngineConfig, source: ModelSource) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert source.path is not None
    path = local_directory(source.path)
    return architecture_class(path).from_pretrained(
        path, dtype=config.dtype, local_files_only=True, use_safetensors=True
    )


def tokenizer_of(path: Path | None) -> Any:
    """The tokenizer in a model directory, for stop texts."""
    if path is None:
        raise ConfigError("stop texts need a tokenizer, and none was given", key="stop")
    return load_tokenizer(local_directory(path))


def end_tokens(model: Any) -> tuple[int, ...]:
    """What the model ends with, by its generation settings or else by its configuration."""
    generation = getattr(model, "generation_config", None)
    tokens = getattr(generation, "eos_token_id", None)
    if tokens is None:
        tokens = model.config.get_text_config().eos_token_id
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (int(tokens),)
