"""Prompts of the engine ``hf``: equal ones are computed once, and kept for who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.engines.config import HFEngineConfig
from rlinf.engines.kv_cache import PromptCapture
from rlinf.engines.prefill import Prefilled, prefill
from rlinf.engines.protocol import GenerationRequest, KeptCache

Begun = tuple[GenerationRequest, int]
"""A request, and how many tokens of its partial completion are read like a prompt, or carried."""


class Prompts:
    """Computed prompts of the requests that wait.

    Args:
        model: A causal language model of transformers.
        config: Section of the engine.
    """

    def __init__(self, model: Any, config: HFEngineConfig) -> None:
        self._model, self._config = model, config
        self._known: dict[bytes, Prefilled] = {}
        self._wanted: Counter[bytes] = Counter()

    def expect(self, request: GenerationRequest) -> None:
        """A request waits: its prompt is kept once it was computed."""
        self._wanted[request.prompt_tokens.tobytes()] += 1

    def forget(self, request: GenerationRequest) -> None:
        """A request waits no longer; its prompt is kept only while another one waits for it."""
        key = request.prompt_tokens.tobytes()
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._known.pop(key, None)

    def drop(self) -> None:
        """Forget what was computed, not who waits."""
        self._known.clear()

    def compute(self, begun: Sequence[Begun]) -> list[Prefilled]:
        """One result per request, with logits for those that have no token yet.

        Those that have a cache are not computed.
        """
        texts: dict[bytes, np.ndarray] = {}
        keys: list[tuple[bytes, bool]] = []
        for request, drawn in begun:
            if request.cache is not None:
                continue
            text = request.prompt_tokens
            if drawn:
                assert request.partial is not None
                text = np.concatenate([text, request.partial.tokens[: drawn - 1]])
            keys.append((text.tobytes(), not drawn))
            texts[text.tobytes()] = text
        wants_logits = {key for key, wanted in keys if wanted}
        known = {key: self._known[key] for key in texts if key in self._known}
        new = [key for key in texts if key not in known]
        computed = self.read([texts[key] for key in new], [key in wants_logits for key in new])
        known.update(zip(new, computed, strict=True))
        for key in wants_logits:
            self._known[key] = known[key]
        results = iter(
            known[key] if wanted else Prefilled(known[key].capture, known[key].row, None)
            for key, wanted in keys
        )
        return [
            next(results) if request.cache is None else self._carried(request.cache)
            for request, _ in begun
        ]

    def _carried(self, cache: KeptCache) -> Prefilled:
        parts = [part[None].to(self._model.device) for part in cache.parts()]
        layers = zip(parts[::2], parts[1::2], strict=True)
        return Prefilled(PromptCapture(layers), 0, None)

    def read(self, texts: Sequence[np.ndarray], wants_logits: Sequence[bool]) -> list[Prefilled]:
        """Run texts through the model; see :func:`~rlinf.engines.prefill.prefill`."""
        return prefill(
            self._model,
            texts,
            wants_logits,
            max_tokens=self._config.max_prefill_tokens,
            alone=self._config.deterministic,
        )
