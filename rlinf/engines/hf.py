"""Continuous batching over a transformers model, in the caller's process.

Sequences join and leave the running batch between steps, so that a long one is never waited for.
Equal prompts are computed once. Attention is over what each sequence has, not over the longest.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.sequences import Completion, StopReason
from rlinf.engines import ragged_attention
from rlinf.engines.config import HFEngineConfig, local_directory
from rlinf.engines.kv_cache import ROUND, RaggedCache
from rlinf.engines.prefill import Prefilled, prefill
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    ModelSource,
    Weights,
    check_request,
)
from rlinf.engines.running import Running
from rlinf.engines.sampling import draw_tokens
from rlinf.engines.weights import assign_weights
from rlinf.errors import ConfigError

_SORT_COST = 4  # of putting rows in order, in passes of attention over the cache


class HFEngine(Engine):
    """Engine on the model of ``source.module``, or of ``source.path``.

    A given module is not changed: the engine uses a second set of layers around the *same*
    parameters (unless ``dtype`` differs from the module's), so that a trainer's mode, gradient
    checkpointing and attention are left alone, and its optimizer steps are seen here at once.
    Call ``update_weights((), version)`` after such a step.

    A sequence is a function of weights, prompt, seed and sampling, up to rounding; with
    ``deterministic`` to the last bit.
    """

    continues_exactly = True

    def __init__(self, config: HFEngineConfig, source: ModelSource) -> None:
        self._config = config
        self._model, self._shared = _serving_model(config, source)
        self.keeps_stale_caches = config.on_update == "keep"
        self._tokenizer, self._path = source.tokenizer, source.path
        text = self._model.config.get_text_config()
        self._context: int | None = getattr(text, "max_position_embeddings", None)
        self._vocabulary = int(text.vocab_size)
        self._end_tokens = _end_tokens(self._model)
        self._running = Running(config.max_running_requests, self._vocabulary, self._model.device)
        self._waiting: deque[GenerationRequest] = deque()
        self._cache = RaggedCache()
        self._prompts: dict[bytes, Prefilled] = {}
        self._wanted: Counter[bytes] = Counter()
        self._ids: set[int] = set()
        self._wasted = 0
        self.version = 0

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and neither returned nor aborted."""
        return len(self._ids)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        if request.request_id in self._ids:
            raise ValueError(f"request {request.request_id} is unfinished")
        check_request(request, context=self._context, vocabulary=self._vocabulary)
        if request.sampling.stop and self._tokenizer is None:
            self._tokenizer = _tokenizer(self._path)
        self._ids.add(request.request_id)
        self._wanted[request.prompt_tokens.tobytes()] += 1
        self._waiting.append(request)

    def step(self) -> list[FinishedCompletion]:
        """One token for every running sequence; waiting requests fill the free places first."""
        if not self._ids:
            return []
        with torch.inference_mode():
            fresh = self._admit()
            decoding = len(self._running) - len(fresh)
            logits = [*self._decode(decoding), *fresh]
            tokens, log_probs = self._draw(logits)
        stopped = self._running.append(tokens, log_probs, self.version)
        return self._finish(stopped)

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        chosen = self._ids if request_ids is None else self._ids & set(request_ids)
        slots = [
            slot
            for slot, request in enumerate(self._running.requests)
            if request.request_id in chosen
        ]
        aborted = self._collect(dict.fromkeys(slots, "abort"))
        kept: deque[GenerationRequest] = deque()
        for request in self._waiting:
            if request.request_id in chosen:
                aborted.append(_never_started(request))
                self._forget(request)
                self._ids.remove(request.request_id)
            else:
                kept.append(request)
        self._waiting = kept
        return aborted

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`."""
        assign_weights(self._model, weights, may_be_empty=self._shared)
        self.version = version
        self._prompts.clear()
        if self._config.on_update == "recompute" and len(self._running):
            with torch.inference_mode():
                self._recompute()

    def release_memory(self) -> None:
        """Give the caches back, and on an accelerator the weights if they are the engine's own."""
        if self.unfinished:
            raise RuntimeError(f"{self.unfinished} requests are unfinished; abort them first")
        self._cache.clear()
        self._prompts.clear()
        if not self._shared:
            self._device = self._model.device
            self._model.to("cpu")

    def restore_memory(self) -> None:
        """Bring the engine's own weights back; caches are allocated when needed."""
        if not self._shared:
            self._model.to(self._device)

    def close(self) -> None:
        """Give the caches back."""
        self._cache.clear()
        self._prompts.clear()
        self._waiting.clear()
        self._ids.clear()

    def _admit(self) -> list[Tensor]:
        """Start waiting requests; returns the logits [V] of those that have no token yet.

        Those that have some, from an earlier abort, take the slots before them.
        """
        free = self._config.max_running_requests - len(self._running)
        taken = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not taken:
            return []
        begun = [(request, self._drawn(request)) for request in taken]
        begun.sort(key=lambda item: not item[1])
        results = self._prefill(begun)
        first = len(self._running)
        columns = max(len(r.prompt_tokens) + r.sampling.max_new_tokens for r in taken)
        widest = max(result.capture.layers[0][0].shape[2] for result in results)
        self._reserve(first + len(taken), max(min(columns, 2 * widest), widest), results[0])
        self._write(np.arange(first, first + len(taken)), results)
        for request, drawn in begun:
            stops = request.sampling.stop_token_ids
            cached = len(request.prompt_tokens) + max(drawn - 1, 0)
            self._running.add(
                request, self._end_tokens if stops is None else stops, cached=cached, drawn=drawn
            )
            self._forget(request)
        logits = [result.logits for result in results]
        return [row for row in logits if row is not None]

    def _drawn(self, request: GenerationRequest) -> int:
        """Tokens of a partial completion that are read like a prompt.

        The deterministic mode decodes again what the present weights sampled, as reading rounds
        otherwise than decoding: only what was read after the last update is read here too.
        """
        if request.partial is None:
            return 0
        if not self._config.deterministic:
            return len(request.partial)
        return int((request.partial.versions != self.version).sum())

    def _prefill(self, begun: list[tuple[GenerationRequest, int]]) -> list[Prefilled]:
        """One result per request; equal prompts are computed once, and kept for who waits."""
        texts: dict[bytes, np.ndarray] = {}
        keys: list[tuple[bytes, bool]] = []
        for request, drawn in begun:
            text = request.prompt_tokens
            if drawn:
                assert request.partial is not None
                text = np.concatenate([text, request.partial.tokens[: drawn - 1]])
            keys.append((text.tobytes(), not drawn))
            texts[text.tobytes()] = text
        wants_logits = {key for key, wanted in keys if wanted}
        known = {key: self._prompts[key] for key in texts if key in self._prompts}
        new = [key for key in texts if key not in known]
        computed = self._run_prefill(
            [texts[key] for key in new], [key in wants_logits for key in new]
        )
        known.update(zip(new, computed, strict=True))
        for key in wants_logits:
            self._prompts[key] = known[key]
        return [
            known[key] if wanted else Prefilled(known[key].capture, known[key].row, None)
            for key, wanted in keys
        ]

    def _run_prefill(self, texts: list[np.ndarray], wants_logits: list[bool]) -> list[Prefilled]:
        return prefill(
            self._model,
            texts,
            wants_logits,
            max_tokens=self._config.max_prefill_tokens,
            alone=self._config.deterministic,
        )

    def _forget(self, request: GenerationRequest) -> None:
        """A request waits no longer; its prompt is kept only while another one waits for it."""
        key = request.prompt_tokens.tobytes()
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._prompts.pop(key, None)

    def _write(self, slots: np.ndarray, results: list[Prefilled]) -> None:
        """Copy prompts into slots, those of one forward pass at once."""
        captures = {id(result.capture): result.capture for result in results}
        for number, capture in captures.items():
            members = [i for i, result in enumerate(results) if id(result.capture) == number]
            rows = np.array([results[i].row for i in members])
            self._cache.write(self._tensor(slots[members]), capture, self._tensor(rows))

    def _reserve(self, slots: int, columns: int, like: Prefilled) -> None:
        self._cache.reserve(slots, columns, like.capture)

    def _recompute(self) -> None:
        """Compute the caches of the running sequences anew."""
        slots = np.arange(len(self._running))
        texts = [self._running.cached_tokens(slot) for slot in slots.tolist()]
        results = self._run_prefill(texts, [False] * len(texts))
        shape = self._cache.shape
        # Columns beyond a text are weighted with 0, which does not hide a NaN of former weights.
        self._cache.clear()
        self._reserve(shape[0], shape[1], results[0])
        self._write(slots, results)

    def _decode(self, rows: int) -> list[Tensor]:
        """Logits of the first ``rows`` slots, each [.., V], together in order."""
        if not rows:
            return []
        cached = self._running.active["cached"][:rows]
        longest = int(cached.max()) + 1
        if longest > self._cache.shape[1]:
            self._cache.extend(longest)
        if self._config.deterministic:
            logits = self._decode_blocks(rows)
        else:
            slots = self._tensor(np.arange(rows))
            lengths = cached + 1
            plan = ragged_attention.plan_segments(
                lengths, dtype=self._model.dtype, device=self._model.device
            )
            area = sum((s.rows.stop - s.rows.start) * s.window for s in plan.segments)
            self._wasted += area - int(lengths.sum())
            logits = [self._forward(np.arange(rows), slots, plan)]
        cached += 1
        return logits

    def _forward(
        self, batch: np.ndarray, targets: Tensor, plan: ragged_attention.DecodePlan
    ) -> Tensor:
        """[n, V] logits of slots ``batch``; the first of them are written to ``targets``."""
        numbers = self._running.active[batch]
        positions = self._tensor(numbers["cached"])
        self._cache.aim(targets, positions[: len(targets)])
        logits: Tensor = self._model(
            self._tensor(numbers["last"])[:, None],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            plan=plan,
        ).logits
        return logits[:, 0]

    def _decode_blocks(self, rows: int) -> list[Tensor]:
        """The same in forward passes of one shape, which depends on a sequence's length alone."""
        size, cached = self._config.block_size, self._running.active["cached"][:rows]
        windows = -(-(cached + 1) // ROUND) * ROUND
        logits: list[Tensor] = [torch.empty(0)] * rows
        for window in np.unique(windows):
            members = np.flatnonzero(windows == window)
            for first in range(0, len(members), size):
                block = members[first : first + size]
                padded = np.pad(block, (0, size - len(block)), mode="edge")
                plan = ragged_attention.plan_block(
                    self._tensor(padded),
                    cached[padded] + 1,
                    int(window),
                    dtype=self._model.dtype,
                    device=self._model.device,
                )
                for slot, row in zip(block, self._forward(padded, self._tensor(block), plan),
                                     strict=False):  # fmt: skip
                    logits[slot] = row
        return logits

    def _draw(self, logits: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [n] of all running sequences; each row's depend on the row alone."""
        rows = torch.cat([part if part.dim() == 2 else part[None] for part in logits])
        draw = self._running.how_to_draw(np.arange(len(rows)))
        tokens, log_probs = draw_tokens(rows, draw)
        return tokens.cpu().numpy(), log_probs.cpu().numpy()

    def _finish(self, stopped: np.ndarray) -> list[FinishedCompletion]:
        """Take out what ended, and put the rest in order when that pays."""
        active = self._running.active
        reasons: dict[int, StopReason] = {}
        for slot in np.flatnonzero(active["count"] >= active["limit"]).tolist():
            reasons[slot] = "length"
        for slot, request in enumerate(self._running.requests):
            if request.sampling.stop and self._ends_with_text(slot, request):
                reasons[slot] = "stop"
        for slot in np.flatnonzero(stopped).tolist():
            reasons[slot] = "stop"
        finished = self._collect(reasons)
        lengths = self._running.active["cached"]
        if self._wasted > _SORT_COST * int(lengths.sum()) and len(lengths):
            order = np.argsort(-lengths, kind="stable")
            with torch.inference_mode():
                self._cache.move(
                    self._tensor(order), self._tensor(np.sort(order)), int(lengths.max())
                )
            self._running.reorder(order)
            self._wasted = 0
        return finished

    def _collect(self, reasons: dict[int, StopReason]) -> list[FinishedCompletion]:
        """Take slots out of the batch and return what they have."""
        if not reasons:
            return []
        finished = [
            FinishedCompletion(
                request_id=self._running.requests[slot].request_id,
                completion=self._running.completion(slot, reason),
            )
            for slot, reason in reasons.items()
        ]
        columns = int(self._running.active["cached"].max())
        source, target = self._running.remove(np.fromiter(reasons, np.int64, len(reasons)))
        if len(source):
            with torch.inference_mode():
                self._cache.move(self._tensor(source), self._tensor(target), columns)
        self._ids.difference_update(item.request_id for item in finished)
        return finished

    def _ends_with_text(self, slot: int, request: GenerationRequest) -> bool:
        """Whether a stop text was completed by the last tokens."""
        numbers = self._running.active[slot]
        if numbers["count"] < max(numbers["minimum"], numbers["known"] + 1):
            return False
        # Each token is at least a byte, and at most the last one completes a character.
        reach = max(len(text.encode()) for text in request.sampling.stop) + 3
        ending = self._tokenizer.decode(self._running.tail(slot, reach))
        return any(text in ending for text in request.sampling.stop)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)


def _serving_model(config: HFEngineConfig, source: ModelSource) -> tuple[Any, bool]:
    """The layers to compute with, and whether their parameters are those of ``source.module``."""
    if source.module is None:
        if source.path is None or source.lora is not None:
            wanted = "a module with its adapter" if source.lora else "a module or a directory"
            raise ConfigError(f"the engine `hf` needs {wanted}")
        model, shared = _load(config, source), False
    else:
        module = source.module
        wanted = module.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        shared = wanted == module.dtype
        model = _second_layers(module) if shared else copy.deepcopy(module).to(wanted)
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
    model.set_attn_implementation(ragged_attention.NAME)
    return model.eval(), shared


def _second_layers(module: nn.Module) -> Any:
    """A copy of the module tree around the same parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _load(config: HFEngineConfig, source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM

    assert source.path is not None
    model = AutoModelForCausalLM.from_pretrained(
        local_directory(source.path),
        dtype=config.dtype,
        local_files_only=True,
        use_safetensors=True,
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _tokenizer(path: Any) -> Any:
    if path is None:
        raise ConfigError("stop texts need a tokenizer, and none was given", key="stop")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(local_directory(path), local_files_only=True)


def _end_tokens(model: Any) -> tuple[int, ...]:
    """What the model ends with, by its generation settings or else by its configuration."""
    generation = getattr(model, "generation_config", None)
    tokens = getattr(generation, "eos_token_id", None)
    if tokens is None:
        tokens = model.config.get_text_config().eos_token_id
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (int(tokens),)


def _never_started(request: GenerationRequest) -> FinishedCompletion:
    if request.partial is not None:
        partial = replace(request.partial, stop_reason="abort", seed=request.seed)
        return FinishedCompletion(request_id=request.request_id, completion=partial)
    nothing = Completion(
        tokens=np.zeros(0, np.int64),
        log_probs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int64),
        stop_reason="abort",
        seed=request.seed,
    )
    return FinishedCompletion(request_id=request.request_id, completion=nothing)
