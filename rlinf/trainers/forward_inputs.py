"""From a batch of sequences to what one forward pass reads, and back.

n sequences of a batch, W their window, T rows of a forward pass without padding, M tokens that are
scored. The hidden states of a prompt do not depend on the answer, so without padding its tokens are
rows once, however many of the sequences begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch, Shared
from rlinf.data.pictures import PictureReader, Pictures, places_of, positions_of
from rlinf.errors import ConfigError
from rlinf.models.vision_language import Seen

_BLOCK_RATIO = 2
"""Sequences whose lengths differ by more than this factor are not attended together."""
_SHORT = 128
"""Length below which that does not matter."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the rows of a forward pass without padding stand where attention needs whole sequences.

    Sequences of similar length stand side by side, padded on the right to the longest. F places.

    Args:
        shapes: Number of sequences and length of the longest, of each block of them.
        padded: [F] the row at each place, any one where there is padding; None: rows stand so
            already.
        chosen: [T] a place of each row.
        places: [≥ T] every place of each row, row after row.
        offsets: [T] where those of each row begin.
    """

    shapes: tuple[tuple[int, int], ...]
    padded: Tensor | None
    chosen: Tensor | None
    places: Tensor | None
    offsets: Tensor | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.shapes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One forward pass.

    Args:
        input_ids: [1, T] without padding, or [n, W].
        position_ids: Like it, 0 at the first token of each sequence; with pictures in the batch
            [3, ...] of that, in time, height and width.
        attention_mask: [n, W] bool; None without padding.
        arrangement: How attention goes about it without padding.
        scored: [M] the row of the hidden states, as [·, H], that scores each token: that of the
            token before it.
        targets: [M] the scored tokens.
        places: [M] where each stands in [n, L], flattened.
        shape: n, L.
        tokens: Of the sequences, as far as they are read; shared ones as often as they occur.
        pictures: Where pictures stand among the rows; None: there are none in the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    arrangement: Arrangement | None
    scored: Tensor
    targets: Tensor
    places: Tensor
    shape: tuple[int, int]
    tokens: int
    pictures: Seen | None = None

    def scatter(self, values: Tensor) -> Tensor:
        """[M] to [n, L], 0 elsewhere."""
        length = self.shape[1]
        # No view, which FSDP would not want from a module.
        return values.new_zeros(self.shape).index_put(
            (self.places // length, self.places % length), values
        )


def ids_of(batch: Batch) -> Tensor:
    """[N, S] int64."""
    return batch.inputs["input_ids"]


def lengths_of(batch: Batch) -> list[int]:
    """[N] tokens that a forward pass must read of each sequence."""
    lengths: list[int] = _needed(batch)[0].sum(dim=1).tolist()
    return lengths


def prompts_of(batch: Batch) -> list[int]:
    """[N] for each sequence the first one that has its prompt."""
    width = ids_of(batch).shape[1] - batch.mask.shape[1]
    attended = batch.inputs["attention_mask"][:, :width].bool()
    return _first_with_prompt(ids_of(batch)[:, :width], attended, batch.pictures)


def window_of(batch: Batch) -> int:
    """W, columns of a forward pass with padding."""
    used = _needed(batch)[0].any(dim=0).nonzero().flatten()
    return int(used[-1]) + 1 - int(used[0])


def layout_of(
    batch: Batch, *, packing: bool, device: torch.device, reader: PictureReader | None = None
) -> Layout:
    """The forward pass that scores every token where ``mask`` is not 0; tokens after the last one
    that is looked at are left out. ``reader`` makes pixel values, where the batch has pictures.

    Raises:
        ValueError: The first token of a sequence is to be scored: nothing stands before it.
    """
    needed, counted = _needed(batch)
    if packing:
        order = torch.argsort(needed.sum(dim=1), stable=True)
        layout = _packed(batch, needed, counted, order, reader)
    else:
        layout = _padded(batch, needed, counted, reader)
    return _on_device(layout, device)


PartT = TypeVar("PartT", Layout, Arrangement)


def _on_device(part: PartT, device: torch.device) -> PartT:
    moved: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, Arrangement):
            moved[field.name] = _on_device(value, device)
        elif isinstance(value, Seen):
            moved[field.name] = value.to(device)
    return replace(part, **moved)


def _needed(batch: Batch) -> tuple[Tensor, Tensor]:
    """[n, S] bool, tokens that a forward pass reads, and [n, S] bool, tokens to be scored."""
    attended = batch.inputs["attention_mask"].bool()
    counted = torch.zeros_like(attended)
    counted[:, attended.shape[1] - batch.mask.shape[1] :] = batch.mask.to(attended.device) > 0
    columns = torch.arange(attended.shape[1], device=attended.device)
    first = torch.where(attended, columns, attended.shape[1]).amin(dim=1, keepdim=True)
    if bool((counted & (columns <= first)).any()):
        raise ValueError("a sequence begins with a token to be scored; it needs a prompt")
    last = torch.where(counted, columns - 1, -1).amax(dim=1, keepdim=True)
    return attended & (columns <= torch.maximum(last, first)), counted


def _packed(
    batch: Batch, needed: Tensor, counted: Tensor, order: Tensor, reader: PictureReader | None
) -> Layout:
    """Shortest sequence first, so that those of similar length are attended together."""
    needed, counted = needed[order], counted[order]
    input_ids = ids_of(batch)[order]
    n, length = batch.mask.shape
    offset = input_ids.shape[1] - length
    pictures = None if batch.pictures is None else batch.pictures[order]
    owner = torch.tensor(_first_with_prompt(input_ids[:, :offset], needed[:, :offset], pictures))
    kept = needed.clone()
    kept[owner != torch.arange(n), :offset] = False
    # The row of each token; one that stands elsewhere has that of its prompt's first sequence.
    row = kept.flatten().cumsum(0).view_as(kept) - 1
    row[:, :offset] = row[owner, :offset]
    position, seen = needed.cumsum(1) - 1, None
    if pictures is not None:
        position, seen = _seen(pictures, needed, kept, reader)
    rows, columns = counted.nonzero(as_tuple=True)
    return Layout(
        input_ids=input_ids[kept].unsqueeze(0),
        position_ids=position[..., kept].unsqueeze(-2),
        attention_mask=None,
        arrangement=_arrangement(needed.sum(dim=1), row[needed], int(kept.sum())),
        scored=row[rows, columns - 1],
        targets=input_ids[rows, columns],
        places=order[rows] * length + (columns - offset),
        shape=(n, length),
        tokens=int(needed.sum()),
        pictures=seen,
    )


def _seen(
    pictures: Shared, needed: Tensor, kept: Tensor, reader: PictureReader | None
) -> tuple[Tensor, Seen | None]:
    """Positions [3, n, W], in columns that are ``needed`` [n, W], and the pictures of those rows
    of the forward pass that are ``kept``.

    Where the batch has pictures and this part of it none, a black one is looked at: with FSDP the
    ranks gather each layer together.
    """
    if reader is None:
        raise ConfigError("the batch has pictures, and nothing says how they are read")
    position = torch.zeros(3, *needed.shape, dtype=torch.int64)
    row = torch.where(kept, kept.flatten().cumsum(0).view_as(kept) - 1, -1)
    found: list[tuple[Pictures, np.ndarray]] = []
    for number, own in enumerate(pictures.of_rows()):
        columns = needed[number].nonzero().flatten()
        position[:, number, columns] = torch.from_numpy(positions_of(len(columns), own))
        places = row[number, columns].numpy()[places_of(own)]
        if own and places[0] >= 0:
            found.append((own, places))
    return position, Seen.of(reader, found, blank=True)


def _first_with_prompt(input_ids: Tensor, read: Tensor, pictures: Shared | None) -> list[int]:
    """[n] the first of the sequences that has the same tokens [n, P] in the same columns, and the
    same pictures."""
    prompts = torch.where(read, input_ids, -1).numpy()
    seen = [0] * len(prompts) if pictures is None else pictures.index.tolist()
    first: dict[tuple[bytes, int], int] = {}
    keys = ((prompt.tobytes(), each) for prompt, each in zip(prompts, seen, strict=True))
    return [first.setdefault(key, number) for number, key in enumerate(keys)]


def _padded(batch: Batch, needed: Tensor, counted: Tensor, reader: PictureReader | None) -> Layout:
    used = needed.any(dim=0).nonzero().flatten()
    first, last = int(used[0]), int(used[-1]) + 1
    rows, columns = counted.nonzero(as_tuple=True)
    n, length = batch.mask.shape
    offset = ids_of(batch).shape[1] - length
    kept = needed[:, first:last]
    position, seen = (kept.cumsum(1) - 1).clamp(min=0), None
    if batch.pictures is not None:
        position, seen = _seen(batch.pictures, kept, torch.ones_like(kept), reader)
    return Layout(
        input_ids=ids_of(batch)[:, first:last],
        position_ids=position,
        attention_mask=kept,
        arrangement=None,
        scored=rows * (last - first) + (columns - 1 - first),
        targets=ids_of(batch)[rows, columns],
        places=rows * length + (columns - offset),
        shape=(n, length),
        tokens=kept.numel(),
        pictures=seen,
    )


def _arrangement(sizes: Tensor, row: Tensor, rows: int) -> Arrangement:
    """Of sequences of ascending sizes [n]; ``row`` is that of each token, sequence after sequence,
    of T ``rows``."""
    shapes = _shapes(sizes.tolist())
    if len(row) == rows and len(shapes) == 1 and int(sizes[0]) == shapes[0][1]:
        return Arrangement(shapes=shapes, padded=None, chosen=None, places=None, offsets=None)
    widths = torch.tensor([length for number, length in shapes for _ in range(number)])
    columns = torch.arange(len(row)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = (widths.cumsum(0) - widths).repeat_interleave(sizes) + columns
    padded = torch.zeros(int(widths.sum()), dtype=torch.int64)
    padded[place] = row
    by_row = torch.argsort(row, stable=True)
    times = torch.bincount(row, minlength=rows)
    offsets = times.cumsum(0) - times
    places = place[by_row]
    return Arrangement(
        shapes=shapes, padded=padded, chosen=places[offsets], places=places, offsets=offsets
    )


def _shapes(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Numbers and longest of blocks of sequences of ascending sizes."""
    shapes, first = [], 0
    for number in range(1, len(sizes) + 1):
        bound = max(_SHORT, _BLOCK_RATIO * sizes[first])
        if number == len(sizes) or sizes[number] > bound:
            shapes.append((number - first, sizes[number - 1]))
            first = number
    return tuple(shapes)
