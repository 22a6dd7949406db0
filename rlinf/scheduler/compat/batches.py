"""Split and merge payloads along their batch dimension, whatever containers they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlinf.scheduler.errors import BatchError

_SCALARS = (bool, int, float, str, bytes)


def infer_batch_size(data: Any) -> int:
    """Length of a list, of a tensor's or array's first dimension, of the first such in a dict."""
    size = _batch_size(data)
    if size is None:
        reason = "all its values are None or scalars" if isinstance(data, dict) else "has none"
        raise BatchError(
            f"Cannot infer a batch size from a {type(data).__name__}: {reason}. Expected a tensor, "
            "array, list, or a dict of them; for other payloads give infer_batch_size_fn."
        )
    return size


def get_batch_size(data: Any, infer_batch_size_fn: Callable[[Any], int] | None = None) -> int:
    """Batch size of a payload by ``infer_batch_size_fn`` or, without it, `infer_batch_size`."""
    return (infer_batch_size_fn or infer_batch_size)(data)


def validate_batch_size(
    data: Any,
    expected_batch_size: int | None,
    infer_batch_size_fn: Callable[[Any], int] | None = None,
) -> None:
    """Check that a payload has the expected batch size; None expects nothing."""
    if expected_batch_size is None:
        return
    size = get_batch_size(data, infer_batch_size_fn)
    if size != expected_batch_size:
        raise BatchError(
            f"Expected batch size {expected_batch_size}, but received {size}. Sender and receiver "
            "must name the same total batch size."
        )


def split_batch(data: Any, split_sizes: Sequence[int]) -> list[Any]:
    """Cut a payload into consecutive shards.

    Tensors, arrays and lists are cut along their first dimension, dicts value by value; ``None``,
    numbers, text and 0-dimensional tensors go whole into every shard. Tensor shards share memory
    with ``data``.
    """
    if isinstance(data, dict):
        columns = [split_batch(value, split_sizes) for value in data.values()]
        rows = zip(*columns, strict=True) if columns else [()] * len(split_sizes)
        return [dict(zip(data, row, strict=True)) for row in rows]
    if _is_whole(data):
        return [data for _ in split_sizes]
    size = infer_batch_size(data)
    if sum(split_sizes) != size or any(part < 0 for part in split_sizes):
        raise BatchError(
            f"Cannot split a batch of {size} into {list(split_sizes)}: the sizes must be 0 or more "
            f"and add up to {size}, they add up to {sum(split_sizes)}."
        )
    if isinstance(data, torch.Tensor):
        return [shard.contiguous() for shard in torch.split(data, list(split_sizes))]
    ends = np.cumsum(split_sizes).tolist()
    return [data[end - part : end] for part, end in zip(split_sizes, ends, strict=True)]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Concatenate shards in their order; the inverse of `split_batch`."""
    if len(batches) == 0:
        raise BatchError("Cannot merge an empty list of batches: there must be at least one shard.")
    first = batches[0]
    if len(batches) == 1:
        return first
    kinds = sorted({type(batch).__name__ for batch in batches})
    if len(kinds) > 1:
        mixed = "None and non-None" if "NoneType" in kinds else ", ".join(kinds)
        raise BatchError(f"Cannot merge a mix of {mixed} payloads: all shards must be of one kind.")
    if isinstance(first, dict):
        for batch in batches[1:]:
            if set(batch) != set(first):
                raise BatchError(
                    f"Cannot merge dicts of different keys: {sorted(map(str, first))} and "
                    f"{sorted(map(str, batch))}."
                )
        return {key: merge_batches([batch[key] for batch in batches]) for key in first}
    if _is_whole(first):
        if all(bool(batch == first) for batch in batches[1:]):
            return first
        raise BatchError(
            f"Cannot merge different values without a batch dimension: {list(batches)}. Give every "
            "shard the same value, or a tensor or list with one entry per sample."
        )
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(batches))
    if isinstance(first, list | tuple):
        return type(first)(item for batch in batches for item in batch)
    raise BatchError(
        f"Unsupported payload type for batch merge: {type(first).__name__}. Expected tensors, "
        "arrays, lists, dicts or None; for other payloads give merge_fn."
    )


def _is_whole(data: Any) -> bool:
    if data is None or isinstance(data, _SCALARS):
        return True
    return isinstance(data, torch.Tensor | np.ndarray | np.generic) and data.ndim == 0


def _batch_size(data: Any) -> int | None:
    if _is_whole(data):
        return None
    if isinstance(data, torch.Tensor | np.ndarray):
        return int(data.shape[0])
    if isinstance(data, list | tuple):
        return len(data)
    if isinstance(data, dict):
        sizes = (_batch_size(value) for value in data.values())
        return next((size for size in sizes if size is not None), None)
    raise BatchError(
        f"Unsupported payload type for batch split: {type(data).__name__}. Expected tensors, "
        "arrays, lists, dicts or None; for other payloads give split_fn or infer_batch_size_fn."
    )
