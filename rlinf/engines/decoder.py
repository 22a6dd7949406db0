"""Decoding of the engine ``hf``: one token of every running sequence per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.engines import ragged_attention
from rlinf.engines.config import HFEngineConfig
from rlinf.engines.prefill import Prefilled
from rlinf.engines.protocol import KeptCache

_ROUND = 64  # columns by which buffers grow
_SORT_COST = 4  # of putting rows in order, in passes of attention over the cache


class RaggedCache:
    """Keys and values of the running sequences; takes the place of a transformers cache.

    Buffers [rows, K, capacity, D] per layer, which grow as needed: a sequence has a row, a token
    the column of its position. Lengths and masks are known to the engine and never asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = self._columns = torch.zeros(0, dtype=torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns that there is space for."""
        return (self._keys[0].shape[0], self._keys[0].shape[2]) if self._keys else (0, 0)

    def aim(self, rows: Tensor, columns: Tensor) -> None:
        """Say where the next forward pass writes its first m rows [m]; more rows are padding."""
        self._rows, self._columns = rows, columns

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [n, K, 1, D] where it was aimed; returns the whole buffers of the layer."""
        place, rows = (self._keys[layer], self._values[layer]), len(self._rows)
        for buffer, new in zip(place, (keys, values), strict=True):
            buffer[self._rows, :, self._columns] = new[:rows, :, 0]
        return place

    def get_seq_length(self, *_: Any) -> int:
        """Not asked for, as positions are given; any number is right."""
        return self.shape[1]

    def add(self, first: int, results: Sequence[Prefilled], columns: int) -> None:
        """Take computed texts into rows from ``first`` on; they may grow to ``columns``."""
        widest = max(result.capture.layers[0][0].shape[2] for result in results)
        rows, have = first + len(results), self.shape
        if rows > have[0]:
            rows = max(rows, 2 * have[0])
        wanted = max(min(columns, 2 * widest), widest, have[1])
        self._resize(max(rows, have[0]), wanted, results[0].capture.layers)
        self._write(np.arange(first, first + len(results)), results)

    def replace(self, results: Sequence[Prefilled]) -> None:
        """Put texts that were computed anew into all rows."""
        shape = self.shape
        # Columns beyond a text are weighted with 0, which does not hide a NaN of former weights.
        self.clear()
        self._resize(*shape, results[0].capture.layers)
        self._write(np.arange(len(results)), results)

    def reach(self, columns: int) -> None:
        """Have at least that many columns: where they grow, by half of what there is or more."""
        rows, have = self.shape
        if columns > have:
            layers = list(zip(self._keys, self._values, strict=True))
            self._resize(rows, max(columns, 3 * have // 2), layers)

    def _resize(self, rows: int, columns: int, like: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``like`` gives layers, heads, dimension, number format and device."""
        have = self.shape
        columns = -(-columns // _ROUND) * _ROUND
        if (rows, columns) == have:
            return
        for index, layer in enumerate(like):
            for buffers, example in zip((self._keys, self._values), layer, strict=True):
                grown = example.new_zeros(rows, example.shape[1], columns, example.shape[3])
                if have[0]:
                    grown[: have[0], :, : have[1]] = buffers[index]
                    buffers[index] = grown
                else:
                    buffers.append(grown)

    def _write(self, rows: np.ndarray, results: Sequence[Prefilled]) -> None:
        """Copy texts into rows, those of one forward pass at once."""
        captures = {id(result.capture): result.capture for result in results}
        for number, capture in captures.items():
            members = [i for i, result in enumerate(results) if id(result.capture) == number]
            sources = self.tensor(np.array([results[i].row for i in members]))
            targets = self.tensor(rows[members])
            for index, (keys, values) in enumerate(capture.layers):
                width = keys.shape[2]
                self._keys[index][targets, :, :width] = keys[sources]
                self._values[index][targets, :, :width] = values[sources]

    def kept(self, row: int, tokens: int, version: int) -> KeptCache:
        """What was computed of the first tokens of a row, under these weights."""
        layers = zip(self._keys, self._values, strict=True)
        parts = [buffer[row, :, :tokens] for layer in layers for buffer in layer]
        return KeptCache(
            version=version,
            shapes=tuple(tuple(part.shape) for part in parts),
            numbers=torch.cat([part.reshape(-1) for part in parts]).cpu(),
        )

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray, columns: int) -> None:
        """Copy rows to others, as far as ``columns``."""
        if len(source):
            sources, targets = self.tensor(source), self.tensor(target)
            for buffer in (*self._keys, *self._values):
                buffer[targets, :, :columns] = buffer[sources, :, :columns]

    def clear(self) -> None:
        """Give the memory back."""
        self._keys, self._values = [], []

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array on the device of the buffers."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class Decoder:
    """Forward passes over the caches of the running sequences, with the ragged attention."""

    def __init__(self, model: Any, config: HFEngineConfig) -> None:
        self._model, self._config = model, config
        self.cache = RaggedCache(model.device)
        self._wasted = 0

    def order(self, lengths: np.ndarray) -> np.ndarray | None:
        """Rows by falling length where putting them so pays, which is then done; else None.

        ``lengths`` [n] are the cached tokens of the running sequences.
        """
        if not len(lengths) or self._wasted <= _SORT_COST * int(lengths.sum()):
            return None
        order = np.argsort(-lengths, kind="stable")
        self.cache.move(order, np.sort(order), int(lengths.max()))
        self._wasted = 0
        return order

    def decode(self, active: np.ndarray) -> list[Tensor]:
        """Logits of the next tokens, each [.., V], together in order.

        ``active`` [n], a view of the numbers of sequences, then counts one cached token more.
        """
        if not len(active):
            return []
        cached = active["cached"]
        lengths = cached + 1
        self.cache.reach(int(lengths.max()))
        if self._config.deterministic:
            logits = self._decode_blocks(active)
        else:
            rows = self.cache.tensor(np.arange(len(active)))
            plan = ragged_attention.plan_segments(
                lengths, dtype=self._model.dtype, device=self._model.device
            )
            area = sum((s.rows.stop - s.rows.start) * s.window for s in plan.segments)
            self._wasted += area - int(lengths.sum())
            logits = [self._forward(active, rows, plan)]
        cached += 1
        return logits

    def _forward(
        self, numbers: np.ndarray, targets: Tensor, plan: ragged_attention.DecodePlan
    ) -> Tensor:
        """[n, V] logits of sequences; the first of them are written to rows ``targets``."""
        columns = self.cache.tensor(numbers["cached"])
        positions = columns + self.cache.tensor(numbers["shift"])
        self.cache.aim(targets, columns[: len(targets)])
        logits: Tensor = self._model(
            self.cache.tensor(numbers["last"])[:, None],
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
            plan=plan,
        ).logits
        return logits[:, 0]

    def _decode_blocks(self, active: np.ndarray) -> list[Tensor]:
        """The same in forward passes of one shape, which depends on a sequence's length alone."""
        size, lengths = self._config.block_size, active["cached"] + 1
        windows = -(-lengths // _ROUND) * _ROUND
        logits: list[Tensor] = [torch.empty(0)] * len(active)
        for window in np.unique(windows):
            members = np.flatnonzero(windows == window)
            for first in range(0, len(members), size):
                block = members[first : first + size]
                padded = np.pad(block, (0, size - len(block)), mode="edge")
                plan = ragged_attention.plan_block(
                    self.cache.tensor(padded),
                    lengths[padded],
                    int(window),
                    dtype=self._model.dtype,
                    device=self._model.device,
                )
                found = self._forward(active[padded], self.cache.tensor(block), plan)
                for row, of_row in zip(block, found, strict=False):
                    logits[row] = of_row
        return logits
