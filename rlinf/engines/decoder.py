"""Decoding of the engine ``hf``: one token of every running sequence per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.engines import ragged_attention
from rlinf.engines.config import HFEngineConfig
from rlinf.engines.kv_cache import ROUND, RaggedCache
from rlinf.engines.prefill import Prefilled
from rlinf.engines.protocol import KeptCache

_SORT_COST = 4  # of putting rows in order, in passes of attention over the cache


class Decoder:
    """The caches of the running sequences, and forward passes over them.

    Args:
        model: A causal language model of transformers, with the ragged attention.
        config: Section of the engine.
    """

    def __init__(self, model: Any, config: HFEngineConfig) -> None:
        self._model, self._config = model, config
        self._cache = RaggedCache()
        self._wasted = 0

    def add(self, first: int, results: Sequence[Prefilled], columns: int) -> None:
        """Take computed texts into slots from ``first`` on; they may grow to ``columns``."""
        widest = max(result.capture.layers[0][0].shape[2] for result in results)
        wanted = max(min(columns, 2 * widest), widest)
        self._cache.reserve(first + len(results), wanted, results[0].capture)
        self._write(np.arange(first, first + len(results)), results)

    def replace(self, results: Sequence[Prefilled]) -> None:
        """Put texts that were computed anew into all slots."""
        shape = self._cache.shape
        # Columns beyond a text are weighted with 0, which does not hide a NaN of former weights.
        self._cache.clear()
        self._cache.reserve(shape[0], shape[1], results[0].capture)
        self._write(np.arange(len(results)), results)

    def _write(self, slots: np.ndarray, results: Sequence[Prefilled]) -> None:
        """Copy texts into slots, those of one forward pass at once."""
        captures = {id(result.capture): result.capture for result in results}
        for number, capture in captures.items():
            members = [i for i, result in enumerate(results) if id(result.capture) == number]
            rows = np.array([results[i].row for i in members])
            self._cache.write(self._tensor(slots[members]), capture, self._tensor(rows))

    def kept(self, slot: int, tokens: int, version: int) -> KeptCache:
        """What was computed of the first tokens of a slot, under these weights."""
        parts = self._cache.read(slot, tokens)
        return KeptCache(
            version=version,
            shapes=tuple(tuple(part.shape) for part in parts),
            numbers=torch.cat([part.reshape(-1) for part in parts]).cpu(),
        )

    def move(self, source: np.ndarray, target: np.ndarray, columns: int) -> None:
        """Copy slots to others, as far as ``columns``."""
        if len(source):
            with torch.inference_mode():
                self._cache.move(self._tensor(source), self._tensor(target), columns)

    def order(self, lengths: np.ndarray) -> np.ndarray | None:
        """Slots by falling length where putting them so pays, which is then done; else None.

        Args:
            lengths: [n] cached tokens of the running sequences.
        """
        if not len(lengths) or self._wasted <= _SORT_COST * int(lengths.sum()):
            return None
        order = np.argsort(-lengths, kind="stable")
        self.move(order, np.sort(order), int(lengths.max()))
        self._wasted = 0
        return order

    def clear(self) -> None:
        """Give the caches back."""
        self._cache.clear()

    def decode(self, active: np.ndarray) -> list[Tensor]:
        """Logits of the next tokens, each [.., V], together in order.

        Args:
            active: [n] numbers of sequences, a view; each has one token more in its cache then.
        """
        if not len(active):
            return []
        cached = active["cached"]
        longest = int(cached.max()) + 1
        if longest > self._cache.shape[1]:
            self._cache.extend(longest)
        if self._config.deterministic:
            logits = self._decode_blocks(active)
        else:
            slots = self._tensor(np.arange(len(active)))
            lengths = cached + 1
            plan = ragged_attention.plan_segments(
                lengths, dtype=self._model.dtype, device=self._model.device
            )
            area = sum((s.rows.stop - s.rows.start) * s.window for s in plan.segments)
            self._wasted += area - int(lengths.sum())
            logits = [self._forward(active, slots, plan)]
        cached += 1
        return logits

    def _forward(
        self, numbers: np.ndarray, targets: Tensor, plan: ragged_attention.DecodePlan
    ) -> Tensor:
        """[n, V] logits of sequences; the first of them are written to slots ``targets``."""
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

    def _decode_blocks(self, active: np.ndarray) -> list[Tensor]:
        """The same in forward passes of one shape, which depends on a sequence's length alone."""
        size, cached = self._config.block_size, active["cached"]
        windows = -(-(cached + 1) // ROUND) * ROUND
        logits: list[Tensor] = [torch.empty(0)] * len(active)
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
                rows = self._forward(active[padded], self._tensor(block), plan)
                for slot, row in zip(block, rows, strict=False):
                    logits[slot] = row
        return logits

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)
