"""``patch``: only the entries that changed since the version that the receivers have.

The sender keeps a snapshot of what it sent, in the receivers' types: an optimizer step that is too
small to change a bfloat16 number costs nothing. Invariant: after an update the receiver equals the
snapshot, bit by bit, and the snapshot the sender's weights in the receivers' types.

Entries are compared by bit pattern, so that NaN equals itself and −0.0 differs from 0.0. Positions
are those in the flattened tensor, in rising order; per tensor they are cast to the smallest
unsigned integer type that holds them or, delta-encoded, their distances.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.processes.byte_layout import ByteLayout, lay_out
from rlinf.scheduler.process import require_process
from rlinf.weight_sync.bucket import Buckets, HostPool, plan_buckets, unpack
from rlinf.weight_sync.config import PatchConfig
from rlinf.weight_sync.errors import VersionSkewError, WeightSyncError
from rlinf.weight_sync.link import Header, Request, agreed_dtypes
from rlinf.weight_sync.protocol import ReceivedWeights, Sent, WeightReceiver, WeightSender

_BLOCK_ELEMENTS = 1 << 17  # compared at once: few enough to stay in the cache of a core
_ALIGNMENT = 8
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Base:
    """Names a snapshot."""

    identity: str  # of the sender: another one's version 3 has other weights
    number: int  # counts its snapshots
    version: int


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A header of all weights; the buckets follow."""

    buckets: Buckets
    base: Base


@dataclass(frozen=True, kw_only=True)
class Changes:
    """A header of a patch, and the patch."""

    patch: Patch
    before: Base
    after: Base


class PatchSender(WeightSender[PatchConfig]):
    """Compares with its snapshot and sends the difference, or everything where that is less."""

    takes_host_tensors = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._identity = secrets.token_hex(8)
        self._count = 0
        self._base: Base | None = None
        self._layout: ByteLayout | None = None
        self._snapshot = torch.empty(0, dtype=torch.uint8)
        self._dense_left = 0

    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent:
        layout = lay_out(weights, agreed_dtypes(weights, requests))
        base, self._base = self._base, None  # until this update has gone out, there is no snapshot
        self._count += 1
        after = Base(identity=self._identity, number=self._count, version=version)
        equal = all(request.base == base for request in requests)
        patch, density = None, None
        if base is not None and equal and layout == self._layout and not self._dense_left:
            patch, density = self._difference(weights, layout)
            if patch is None:
                self._dense_left = self._config.retry_after
        else:
            self._dense_left = max(0, self._dense_left - 1)
        if patch is not None and base is not None:
            self._link.header(version, Changes(patch=patch, before=base, after=after))
            kind, nbytes = "patch", patch.nbytes
        else:
            kind, nbytes = "bucket", self._send_whole(weights, layout, after)
        self._base = after
        return Sent(version=version, kind=kind, nbytes=nbytes, density=density)

    def _difference(
        self, weights: dict[str, Tensor], layout: ByteLayout
    ) -> tuple[Patch | None, float]:
        """The patch, None where all weights are smaller, and the density of what was compared."""
        changes, nbytes, entries, compared, most = [], 0, 0, 0, max(layout.nbytes, 1)
        for ordinal, entry in enumerate(layout.owners):
            flat = entry.view(self._snapshot).view(-1)
            positions, values = update_snapshot(weights[entry.name], flat, entry.dtype)
            if positions.size:
                changes.append(Change(ordinal=ordinal, positions=positions, values=values))
            entries += positions.size
            compared += entry.numel
            nbytes += values.nbytes
            if nbytes >= most:  # the values alone are too much
                return None, entries / compared
        patch = encode(changes, delta=self._config.delta_encoding)
        return (patch if patch.nbytes < most else None), entries / max(compared, 1)

    def _send_whole(self, weights: dict[str, Tensor], layout: ByteLayout, after: Base) -> int:
        if layout != self._layout:
            self._layout = layout
            self._snapshot = torch.empty(layout.nbytes, dtype=torch.uint8)
        for entry in layout.owners:
            entry.view(self._snapshot).copy_(weights[entry.name])
        ranges = plan_buckets(layout, self._config.bucket_size)
        buckets = Buckets(layout=layout, ranges=ranges)
        self._link.header(after.version, Whole(buckets=buckets, base=after))
        by_reference = require_process().runtime == "local"
        for begin, end in ranges:
            flat = self._snapshot[begin:end]
            self._link.part(flat.clone() if by_reference else flat)
        return sum(end - begin for begin, end in ranges)


class PatchReceiver(WeightReceiver[PatchConfig]):
    """Keeps the weights and writes patches into them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._held: Base | None = None
        self._layout = ByteLayout(())
        self._tensors: dict[str, Tensor] = {}
        if self._config.in_place and self._targets is None:
            raise WeightSyncError(
                "in_place writes into the tensors that a receiver was built for; give `targets`, "
                "or set in_place to false"
            )

    def _base(self) -> Base | None:
        return self._held

    def _receive(self, header: Header) -> ReceivedWeights:
        if isinstance(header.body, Whole):
            self._take(header.body)
        else:
            self._patch(header.body)
        return ReceivedWeights(dict(self._tensors), header.version)

    def _take(self, whole: Whole) -> None:
        """Replace all weights, once all buckets are here."""
        layout, ranges = whole.buckets.layout, whole.buckets.ranges
        parts = [self._link.part() for _ in ranges]
        self._held = None
        if self._config.in_place:
            self._tensors = _own(self._targets or {}, layout)
        elif layout != self._layout:
            self._tensors = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
        self._layout = layout
        for name, tensor in unpack(layout, ranges, parts, HostPool()).items():
            self._tensors[name].copy_(tensor)
        self._held = whole.base

    def _patch(self, changes: Changes) -> None:
        """Write what changed; where that is for other weights, the next request is for all."""
        if changes.before != self._held:
            held, self._held = self._held, None
            mine = "no version" if held is None else f"version {held.version}"
            raise VersionSkewError(
                f"a patch from version {changes.before.version} to {changes.after.version} came to "
                f"a receiver with {mine} of sender {held.identity if held else '-'}; the next "
                "update will be a whole one"
            )
        owners = self._layout.owners
        patterns = [bit_pattern(torch.empty(0, dtype=entry.dtype)).dtype for entry in owners]
        # Everything is decoded before anything is written: a damaged patch changes nothing.
        decoded = list(decode(changes.patch, patterns.__getitem__))
        places: dict[int, list[np.ndarray]] = {}
        by_offset = self._tensors_by_offset()
        for change in decoded:
            entry = owners[change.ordinal]
            places[change.ordinal] = [bit_pattern(t) for t in by_offset[entry.offset]]
            if change.positions[-1] >= places[change.ordinal][0].size:
                raise WeightSyncError(f"a patch of {entry.name} reaches beyond its end")
        self._held = None
        for change in decoded:
            for place in places[change.ordinal]:
                place[change.positions] = change.values
        self._held = changes.after

    def _tensors_by_offset(self) -> dict[int, list[Tensor]]:
        """Tensors of each owner: one, or several where the receiver's are not tied."""
        found: dict[int, dict[int, Tensor]] = {}
        for entry in self._layout.entries:
            tensor = self._tensors[entry.name]
            found.setdefault(entry.offset, {})[tensor.data_ptr()] = tensor
        return {offset: list(tensors.values()) for offset, tensors in found.items()}


def _own(targets: Any, layout: ByteLayout) -> dict[str, Tensor]:
    """The receiver's own tensors, which are to be written by position."""
    found = {}
    for entry in layout.entries:
        tensor = targets.get(entry.name)
        if tensor is None or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise WeightSyncError(
                f"{entry.name} is no contiguous CPU tensor of the receiver; set in_place to false"
            )
        found[entry.name] = tensor.detach()
    return found


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
