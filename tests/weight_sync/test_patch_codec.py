"""Changed entries as arrays and back, for any density."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.patch import (
    Change,
    bit_pattern,
    decode,
    encode,
    update_snapshot,
)

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def random_bits(numel: int, dtype: torch.dtype, generator: np.random.Generator) -> torch.Tensor:
    """Any bit pattern, so also NaNs with payloads, infinities and denormal numbers."""
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, numel).astype(bool))
    if not numel:
        return torch.empty(0, dtype=dtype)
    raw = generator.integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.sampled_from([0, 1, 7, 300, 200_000]), min_size=1, max_size=3),
    density=st.sampled_from([0.0, 1e-5, 0.003, 0.2, 1.0]),
    delta=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_patch_makes_the_old_values_the_new_ones(dtype, sizes, density, delta, seed):
    generator = np.random.default_rng(seed)
    olds = [random_bits(size, dtype, generator) for size in sizes]
    news = []
    for old in olds:
        fresh = bit_pattern(random_bits(old.numel(), dtype, generator))
        mask = generator.random(fresh.size) < density
        mixed = np.where(mask, fresh, bit_pattern(old))
        news.append(torch.from_numpy(mixed).view(dtype) if mixed.size else old.clone())
    receivers = [old.clone() for old in olds]
    changes = []
    for ordinal, (new, old) in enumerate(zip(news, olds, strict=True)):
        differing = int((bit_pattern(new) != bit_pattern(old)).sum())
        positions, values = update_snapshot(new, old, dtype)
        assert len(positions) == differing
        assert np.array_equal(bit_pattern(old), bit_pattern(new))  # the snapshot
        if positions.size:
            changes.append(Change(ordinal=ordinal, positions=positions, values=values))
    patch = encode(changes, delta=delta)
    for change in decode(patch, lambda ordinal: bit_pattern(receivers[ordinal]).dtype):
        bit_pattern(receivers[change.ordinal])[change.positions] = change.values
    for receiver, new in zip(receivers, news, strict=True):
        assert np.array_equal(bit_pattern(receiver), bit_pattern(new))


def test_bits_are_compared_not_values():
    old = torch.tensor([0.0, math.nan, 1.0, -0.0])
    new = torch.tensor([-0.0, math.nan, 1.0, -0.0])
    positions, values = update_snapshot(new, old, torch.float32)
    assert positions.tolist() == [0]
    assert values.tolist() == [np.array([-0.0], np.float32).view(np.int32)[0]]


def test_changes_that_the_receivers_type_does_not_see_cost_nothing():
    weights = torch.ones(100)
    snapshot = weights.bfloat16()
    positions, _ = update_snapshot(weights + 1e-4, snapshot, torch.bfloat16)
    assert positions.size == 0


@pytest.mark.parametrize(
    ("positions", "delta", "width"),
    [
        ([0, 255], True, 1),
        ([0, 256], True, 2),
        ([0, 200, 400, 600], True, 1),
        ([0, 200, 400, 600], False, 2),
        ([70_000, 70_001], True, 1),
        ([70_000, 70_001], False, 4),
        ([0, 1 << 33], True, 8),
    ],
)
def test_positions_take_the_smallest_type(positions, delta, width):
    numbers = np.array(positions, np.int64)
    change = Change(ordinal=3, positions=numbers, values=numbers.astype(np.int16))
    patch = encode([change], delta=delta)
    assert patch.widths.tolist() == [width]
    (found,) = decode(patch, lambda _: np.dtype(np.int16))
    assert found.positions.tolist() == positions
    assert found.ordinal == 3


@pytest.mark.parametrize("size", [-8, 8])
def test_a_patch_of_another_length_is_refused(size):
    numbers = np.arange(50)
    patch = encode([Change(ordinal=0, positions=numbers, values=numbers)], delta=True)
    damaged = dataclasses.replace(patch, data=np.resize(patch.data, patch.data.size + size))
    with pytest.raises(WeightSyncError):
        list(decode(damaged, lambda _: np.dtype(np.int64)))
