"""Where every tensor lies in one flat range of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.processes.shared_block import ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which it lies there
    offset: int  # first byte in the flat range
    tied: bool  # whether an earlier entry lies at the same place, because both share their memory

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.nbytes

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """The tensor in a flat uint8 range that begins at byte ``start``."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype, device=flat.device)
        part = flat[self.offset - start : self.end - start]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ByteLayout:
    """Several tensors, in the order in which they were given."""

    entries: tuple[Entry, ...]

    @property
    def owners(self) -> list[Entry]:
        """Entries that are not tied to an earlier one."""
        return [entry for entry in self.entries if not entry.tied]

    @property
    def nbytes(self) -> int:
        """Length of the flat range."""
        return max((_aligned(entry.end) for entry in self.entries), default=0)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """All tensors in a flat range; tied ones are one tensor."""
        at = {entry.offset: entry.view(flat) for entry in self.owners}
        return {entry.name: at[entry.offset] for entry in self.entries}


def lay_out(weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> ByteLayout:
    """Lay tensors out one after the other, in other types than their own where given by name."""
    entries: list[Entry] = []
    places: dict[Any, int] = {}
    end = 0
    for name, tensor in weights.items():
        dtype = dtypes.get(name, tensor.dtype)
        identity = _identity(tensor, name), dtype
        tied = identity in places
        offset = places.setdefault(identity, end)
        entry = Entry(name, tuple(tensor.shape), dtype, offset, tied)
        entries.append(entry)
        # Also an empty tensor takes a place, so that no two owners have the same one.
        end = end if tied else _aligned(max(entry.end, offset + 1))
    return ByteLayout(tuple(entries))


def flat_bytes(tensor: Tensor) -> Tensor:
    """[n] uint8 memory of a tensor; a copy only where it is not contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element, or none, is contiguous with any stride, and to be seen as bytes with none but 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _identity(tensor: Tensor, name: str) -> Any:
    if not tensor.numel():
        return name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
