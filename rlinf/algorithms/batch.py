"""The one batch that everything is trained on: tokens, action chunks and transitions alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """What several rows have in common, held once: row i has ``items[index[i]]``.

    A selection of rows keeps all items.
    """

    index: Tensor  # [N] int64
    items: tuple[Any, ...]

    def __getitem__(self, rows: Tensor | slice) -> Shared:
        return Shared(self.index[rows], self.items)

    def to(self, device: torch.device | str) -> Shared:
        """It stays on the host."""
        del device
        return self

    def of_rows(self) -> list[Any]:
        """N items, by reference."""
        return [self.items[number] for number in self.index.tolist()]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """N rows of K terms.

    A row is an answer, a chunk step or a transition. A term is what has a log-prob of its own: a
    token, an action dimension, a primitive action or a whole chunk. For answers V = K = L; for
    chunk steps V is 1 or C.

    Args:
        inputs: Each [N, ...]; only the model, and what packs it, reads them. Answers:
            ``input_ids`` [N, S] int64, left-padded prompt | right-padded response, and
            ``attention_mask`` [N, S] bool. Chunk steps: observations and raw actions.
        mask: [N, K], 1 where a term counts in the loss: it was sampled, and, in a prepared batch,
            its row is trained on.
        log_probs: [N, K], of the policy that acted.
        rewards: [N].
        versions: [N, K] int64, of the weights that acted.
        groups: [N] int64; rows that may be compared share a number.
        truncated: [N] bool, cut off by a limit of time or length.
        valid: [N] bool; False where a fault spoilt the row, or its reward could not be computed.
            Such a row is neither compared with others nor trained on.
        weights: [N] share of each row in the loss; None: 1.
        proximal_log_probs: [N, K], of the weights that the phase begins with, recomputed before
            the first update.
        reference_log_probs: [N, K], of the reference policy.
        values: [N, V] of the critic before the first update; that of a token is a function of
            everything before it.
        returns: [N, V] value targets; None before preparation, and without a critic.
        advantages: [N, K]; None before preparation.
        version: Of the weights that the phase begins with; None: those that acted.
        pictures: :data:`~rlinf.data.pictures.Pictures` of the prompts; None: there are none.
    """

    inputs: Mapping[str, Tensor]
    mask: Tensor
    log_probs: Tensor
    rewards: Tensor
    versions: Tensor
    groups: Tensor
    truncated: Tensor
    valid: Tensor
    weights: Tensor | None = None
    proximal_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None
    version: int | None = None
    pictures: Shared | None = None

    @classmethod
    def of(cls, *, inputs: Mapping[str, Tensor], mask: Tensor, **columns: Any) -> Batch:
        """A batch of what was not sampled: columns that are not given hold 0, ``valid`` True."""
        rows, device = len(mask), mask.device
        flags = torch.zeros(rows, dtype=torch.bool, device=device)
        filled = {
            "log_probs": torch.zeros_like(mask),
            "rewards": torch.zeros(rows, device=device),
            "versions": torch.zeros(mask.shape, dtype=torch.int64, device=device),
            "groups": torch.arange(rows, device=device),
            "truncated": flags,
            "valid": ~flags,
        }
        return cls(inputs=inputs, mask=mask, **(filled | columns))

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def nbytes(self) -> int:
        """Of all columns but pictures."""
        return sum(column.nbytes for column in self.tensors().values())

    def select(self, indices: Tensor | slice) -> Batch:
        """The rows at ``indices`` (integers, a mask or a slice)."""
        return self._map(lambda column: column[indices])

    def split(self, size: int) -> list[Batch]:
        """Consecutive pieces of ``size`` rows; the last one may be smaller."""
        if size >= len(self):
            return [self]
        return [self.select(slice(i, i + size)) for i in range(0, len(self), size)]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        if self.mask.device == torch.device(device):
            return self
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[Any], Any]) -> Batch:
        changed: dict[str, Any] = {
            "inputs": {name: change(column) for name, column in self.inputs.items()}
        }
        for field in fields(self)[1:]:
            column = getattr(self, field.name)
            moves = isinstance(column, Tensor | Shared)
            changed[field.name] = change(column) if moves else column
        return Batch(**changed)

    def fold(self, per_dimension: Tensor) -> Tensor:
        """Log-probs [N, K] of the terms from [N, C, A] of each action dimension, which are summed
        over primitive actions or chunks where these are the terms; [N, K] stay as they are."""
        if per_dimension.ndim == 2:
            return per_dimension
        terms = self.mask.shape[1]
        if terms == per_dimension[0].numel():
            return per_dimension.flatten(1)
        if terms == per_dimension.shape[1]:
            return per_dimension.sum(dim=-1)
        if terms != 1:
            raise ValueError(
                f"{terms} terms per row are none of {tuple(per_dimension.shape[1:])} dimensions"
            )
        return per_dimension.flatten(1).sum(dim=-1, keepdim=True)

    def staleness(self) -> Tensor | None:
        """[N, K] int64, phases between the weights that acted and those that the phase begins
        with; None where these are not known."""
        return None if self.version is None else self.version - self.versions

    def tensors(self) -> dict[str, Tensor]:
        """A flat dictionary of all columns but pictures; entries of ``inputs`` get that prefix."""
        found = {f"inputs.{name}": column for name, column in self.inputs.items()}
        for field in fields(self)[1:]:
            column = getattr(self, field.name)
            if isinstance(column, Tensor):
                found[field.name] = column
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """The inverse of :meth:`tensors`."""
        prefix = "inputs."
        inputs = {n.removeprefix(prefix): c for n, c in tensors.items() if n.startswith(prefix)}
        columns: dict[str, Any] = {n: c for n, c in tensors.items() if not n.startswith(prefix)}
        return cls(inputs=inputs, **columns)
