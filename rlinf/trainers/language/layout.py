"""From a batch of sequences to what one forward pass reads, and back.

n sequences of a batch, W their window, T their tokens without padding, M tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

_SEGMENT_RATIO = 2
"""Sequences whose lengths differ by more than this factor are not attended together."""
_SHORT = 128
"""Length below which that does not matter."""


class Sequences(Protocol):
    """What a batch must have: see :class:`~rlinf.algorithms.tokens.protocol.TokenBatch`."""

    @property
    def input_ids(self) -> Tensor:
        """[N, S] int64."""

    @property
    def attention_mask(self) -> Tensor:
        """[N, S] bool."""

    @property
    def mask(self) -> Tensor:
        """[N, L], of the last L columns."""

    def __len__(self) -> int: ...

    def select(self, indices: Tensor | slice) -> Self:
        """The sequences at ``indices``."""


Batch = TypeVar("Batch", bound=Sequences)


@dataclass(frozen=True)
class Segment:
    """Consecutive sequences that are attended together, padded on the right to the longest.

    Args:
        tokens: Where they stand among the T tokens.
        shape: Number of sequences, length of the longest.
        padded: [number · longest] the token at each place, any one where there is padding; None
            where there is no padding.
        places: [tokens] the place of each token.
    """

    tokens: slice
    shape: tuple[int, int]
    padded: Tensor | None
    places: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One forward pass.

    Args:
        input_ids: [1, T] without padding, or [n, W].
        position_ids: Like it; 0 at the first token of each sequence.
        attention_mask: [n, W] bool; None without padding.
        segments: How attention goes about it without padding.
        scored: [M] the row of the hidden states, as [·, H], that scores each token: that of the
            token before it.
        targets: [M] the scored tokens.
        places: [M] where each stands in [n, L], flattened.
        shape: n, L.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    segments: tuple[Segment, ...]
    scored: Tensor
    targets: Tensor
    places: Tensor
    shape: tuple[int, int]

    def scatter(self, values: Tensor) -> Tensor:
        """[M] to [n, L], 0 elsewhere."""
        whole = values.new_zeros(self.shape[0] * self.shape[1])
        return whole.index_copy(0, self.places, values).view(self.shape)

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.input_ids.numel()


def lengths_of(batch: Sequences) -> list[int]:
    """[N] tokens that a forward pass must read of each sequence."""
    lengths: list[int] = _needed(batch)[0].sum(dim=1).tolist()
    return lengths


def layout_of(batch: Sequences, *, packing: bool, device: torch.device) -> Layout:
    """The forward pass that scores every token where ``mask`` is not 0.

    Tokens after the last one that is looked at are left out.

    Raises:
        ValueError: The first token of a sequence is to be scored: nothing stands before it.
    """
    needed, counted = _needed(batch)
    if packing:
        order = torch.argsort(needed.sum(dim=1), stable=True)
        layout = _packed(batch, needed, counted, order)
    else:
        layout = _padded(batch, needed, counted)
    moved: Layout = on_device(layout, device)
    return moved


def on_device(value: Any, device: torch.device) -> Any:
    """A dataclass with its tensors, and those of dataclasses in a tuple, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on_device(item, device) for item in value)
    if isinstance(value, Segment | Layout):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: on_device(getattr(value, name), device) for name in names})
    return value


def _needed(batch: Sequences) -> tuple[Tensor, Tensor]:
    """[n, S] bool, tokens that a forward pass reads, and [n, S] bool, tokens to be scored."""
    attended = batch.attention_mask.bool()
    counted = torch.zeros_like(attended)
    counted[:, attended.shape[1] - batch.mask.shape[1] :] = batch.mask > 0
    columns = torch.arange(attended.shape[1], device=attended.device)
    first = torch.where(attended, columns, attended.shape[1]).amin(dim=1, keepdim=True)
    if bool((counted & (columns <= first)).any()):
        raise ValueError("a sequence begins with a token to be scored; it needs a prompt")
    last = torch.where(counted, columns - 1, -1).amax(dim=1, keepdim=True)
    return attended & (columns <= torch.maximum(last, first)), counted


def _packed(batch: Sequences, needed: Tensor, counted: Tensor, order: Tensor) -> Layout:
    """Shortest sequence first, so that those of similar length are attended together."""
    needed, counted = needed[order], counted[order]
    input_ids = batch.input_ids[order]
    # One past the number of each token among the T, counted along the rows.
    number = needed.flatten().cumsum(0).view_as(needed)
    position = needed.cumsum(1) - 1
    rows, columns = counted.nonzero(as_tuple=True)
    n, length = batch.mask.shape
    offset = input_ids.shape[1] - length
    sizes: list[int] = needed.sum(dim=1).tolist()
    return Layout(
        input_ids=input_ids[needed].unsqueeze(0),
        position_ids=position[needed].unsqueeze(0),
        attention_mask=None,
        segments=_segments(sizes),
        scored=number[rows, columns - 1] - 1,
        targets=input_ids[rows, columns],
        places=order[rows] * length + (columns - offset),
        shape=(n, length),
    )


def _padded(batch: Sequences, needed: Tensor, counted: Tensor) -> Layout:
    used = needed.any(dim=0).nonzero().flatten()
    first, last = int(used[0]), int(used[-1]) + 1
    rows, columns = counted.nonzero(as_tuple=True)
    n, length = batch.mask.shape
    offset = batch.input_ids.shape[1] - length
    kept = needed[:, first:last]
    return Layout(
        input_ids=batch.input_ids[:, first:last],
        position_ids=(kept.cumsum(1) - 1).clamp(min=0),
        attention_mask=kept,
        segments=(),
        scored=rows * (last - first) + (columns - 1 - first),
        targets=batch.input_ids[rows, columns],
        places=rows * length + (columns - offset),
        shape=(n, length),
    )


def _segments(sizes: Sequence[int]) -> tuple[Segment, ...]:
    """Segments of sequences of ascending sizes."""
    segments, first, start = [], 0, 0
    for number in range(1, len(sizes) + 1):
        bound = max(_SHORT, _SEGMENT_RATIO * sizes[first])
        if number == len(sizes) or sizes[number] > bound:
            segments.append(_segment(sizes[first:number], start))
            start += sum(sizes[first:number])
            first = number
    return tuple(segments)


def _segment(sizes: Sequence[int], start: int) -> Segment:
    longest, total = sizes[-1], sum(sizes)
    tokens, shape = slice(start, start + total), (len(sizes), longest)
    if sizes[0] == longest:
        return Segment(tokens, shape, None, None)
    present = torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)
    padded = (present.flatten().cumsum(0) - 1).clamp(min=0)
    return Segment(tokens, shape, padded, present.flatten().nonzero().flatten())
