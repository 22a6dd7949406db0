"""Changed entries of tensors as a few flat arrays, and back.

Entries are compared by bit pattern, so that NaN equals itself and −0.0 differs from 0.0. Positions
are those in the flattened tensor, in rising order; per tensor they are cast to the smallest
unsigned integer type that holds them or, delta-encoded, their distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.weight_sync.errors import WeightSyncError

_BLOCK_ELEMENTS = 1 << 17  # compared at once: few enough to stay in the cache of a core
_ALIGNMENT = 8
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changed entries of one tensor."""

    ordinal: int  # number of the tensor
    positions: np.ndarray  # [n] int64, rising
    values: np.ndarray  # [n] integers, the new bit patterns


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Changes of all tensors; K of them changed."""

    ordinals: np.ndarray  # [K] numbers of the tensors
    counts: np.ndarray  # [K] changed entries of each
    firsts: np.ndarray  # [K] position of the first one
    widths: np.ndarray  # [K] bytes of an encoded position
    delta: bool  # whether positions are encoded as distances to the one before
    data: np.ndarray  # uint8: of each tensor its positions, then its values, each padded to 8 bytes

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        arrays = (self.ordinals, self.counts, self.firsts, self.widths, self.data)
        return sum(array.nbytes for array in arrays)


def bit_pattern(flat: Tensor) -> np.ndarray:
    """A contiguous CPU tensor as [n] integers of its element size, without a copy.

    Complex numbers of 16 bytes are two integers each.
    """
    width = min(flat.dtype.itemsize, max(_PATTERNS))
    array: np.ndarray = flat.view(-1).view(_PATTERNS[width]).numpy()
    return array


def update_snapshot(
    new: Tensor, snapshot: Tensor, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Find what changed in the sender's tensor, and take it over into the snapshot.

    Args:
        new: The tensor of the sender.
        snapshot: [n] flat, in the type of the receiver; changed in place.
        dtype: That type.

    Returns:
        Positions [m] int64 and bit patterns [m] of the changed entries.
    """
    source = new.cpu().contiguous().view(-1)
    positions, values = [], []
    for begin in range(0, source.numel(), _BLOCK_ELEMENTS):
        part = slice(begin, begin + _BLOCK_ELEMENTS)
        now, before = bit_pattern(source[part].to(dtype)), bit_pattern(snapshot[part])
        found = np.flatnonzero(now != before)
        if found.size:
            changed = now[found]
            before[found] = changed
            values.append(changed)
            positions.append(found + begin * (len(now) // (source[part].numel() or 1)))
    if not positions:
        return np.zeros(0, np.int64), bit_pattern(snapshot[:0])
    return np.concatenate(positions), np.concatenate(values)


def encode(changes: Sequence[Change], *, delta: bool) -> Patch:
    """Put changes into flat arrays: at most one per tensor, none of them empty."""
    arrays: list[np.ndarray] = []
    widths = []
    for change in changes:
        numbers = np.diff(change.positions) if delta else change.positions[1:]
        highest = int(numbers.max()) if numbers.size else 0
        width = next(width for width in _WIDTHS if highest < 1 << 8 * width)
        widths.append(width)
        arrays += [_padded(numbers.astype(f"u{width}")), _padded(change.values)]
    return Patch(
        ordinals=np.array([change.ordinal for change in changes], np.int64),
        counts=np.array([len(change.positions) for change in changes], np.int64),
        firsts=np.array([change.positions[0] for change in changes], np.int64),
        widths=np.array(widths, np.uint8),
        delta=delta,
        data=np.concatenate(arrays) if arrays else np.zeros(0, np.uint8),
    )


def decode(patch: Patch, value_dtype: Callable[[int], np.dtype]) -> Iterator[Change]:
    """The changes that were encoded; a WeightSyncError where the patch is damaged.

    ``value_dtype`` gives the integer type of the bit patterns of a tensor, by its number.
    """
    at = 0
    columns = zip(patch.ordinals, patch.counts, patch.firsts, patch.widths, strict=True)
    for ordinal, count, first, width in columns:
        kind = value_dtype(int(ordinal))
        numbers, at = _take(patch.data, at, np.dtype(f"u{width}"), int(count) - 1)
        values, at = _take(patch.data, at, kind, int(count))
        positions = np.empty(int(count), np.int64)
        positions[0], positions[1:] = first, numbers
        if patch.delta:
            np.cumsum(positions, out=positions)
        yield Change(ordinal=int(ordinal), positions=positions, values=values)
    if at != patch.data.size:
        raise WeightSyncError(f"a patch of {at} bytes came with {patch.data.size}")


def _padded(array: np.ndarray) -> np.ndarray:
    raw = array.view(np.uint8)
    missing = -raw.size % _ALIGNMENT
    return np.concatenate([raw, np.zeros(missing, np.uint8)]) if missing else raw


def _take(data: np.ndarray, at: int, kind: np.dtype, count: int) -> tuple[np.ndarray, int]:
    end = at + kind.itemsize * count
    if end > data.size:
        raise WeightSyncError(f"a patch ends at byte {data.size}, {end} were announced")
    return data[at:end].view(kind), end + -end % _ALIGNMENT
