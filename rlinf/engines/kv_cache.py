"""Key-value caches of the engine ``hf``: one row per running sequence, a token's position is its
column.

Both classes answer the calls that a transformers model makes to its cache, ``update`` and
``get_seq_length``; lengths and masks are known to the engine and never asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ROUND = 64
"""Columns by which buffers grow."""


class PromptCapture:
    """Keeps the keys and values of one forward pass over whole prompts, [N, K, P, D] per layer."""

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.layers = list(layers)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep them; attention is over what was given."""
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the prompts: none."""
        return 0


class RaggedCache:
    """Buffers [slots, K, capacity, D] per layer, which grow as needed."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._columns = self._rows

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and columns that there is space for."""
        if not self._keys:
            return 0, 0
        return self._keys[0].shape[0], self._keys[0].shape[2]

    def aim(self, rows: Tensor, columns: Tensor) -> None:
        """Say where the next forward pass writes its first m rows; more rows are padding.

        Args:
            rows: [m] slots.
            columns: [m] columns.
        """
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

    def reserve(self, slots: int, columns: int, like: PromptCapture) -> None:
        """Grow to at least that size.

        Args:
            slots: Rows.
            columns: Columns.
            like: Gives layers, heads, dimension, number format and device.
        """
        have = self.shape
        if slots > have[0]:
            slots = max(slots, 2 * have[0])
        self._resize(max(slots, have[0]), max(columns, have[1]), like.layers)

    def extend(self, columns: int) -> None:
        """Grow to at least that many columns, and to half as many again as there are."""
        slots, have = self.shape
        wanted = max(columns, 3 * have // 2)
        self._resize(slots, wanted, list(zip(self._keys, self._values, strict=True)))

    def _resize(self, slots: int, columns: int, like: list[tuple[Tensor, Tensor]]) -> None:
        have = self.shape
        columns = -(-columns // ROUND) * ROUND
        if (slots, columns) == have:
            return
        for index, layer in enumerate(like):
            for buffers, example in zip((self._keys, self._values), layer, strict=True):
                grown = example.new_zeros(slots, example.shape[1], columns, example.shape[3])
                if have[0]:
                    grown[: have[0], :, : have[1]] = buffers[index]
                    buffers[index] = grown
                else:
                    buffers.append(grown)

    def write(self, slots: Tensor, capture: PromptCapture, source: Tensor) -> None:
        """Copy captured prompts, row ``source[i]`` into slot ``slots[i]``, columns from 0 on."""
        for index, (keys, values) in enumerate(capture.layers):
            width = keys.shape[2]
            self._keys[index][slots, :, :width] = keys[source]
            self._values[index][slots, :, :width] = values[source]

    def read(self, row: int, columns: int) -> list[Tensor]:
        """The first columns of a row, views: [K, columns, D] of keys and values of each layer."""
        layers = zip(self._keys, self._values, strict=True)
        return [buffer[row, :, :columns] for layer in layers for buffer in layer]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy rows to other slots, as far as ``columns``."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :, :columns] = buffer[source, :, :columns]

    def clear(self) -> None:
        """Give the memory back."""
        self._keys, self._values = [], []
