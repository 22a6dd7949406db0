"""Sharded checkpoints: each rank writes its part, any number of ranks reads them.

The format is that of torch's distributed checkpoint. Reading runs no code from the files: of its
pickled index only the classes of that format are built.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlinf.errors import CheckpointError
from rlinf.trainers.ranks import Grid, Replicas

_INDEX = ".metadata"

Tree = Mapping[str, Any]
"""Tensors (distributed ones where ranks divide them) and plain data, by name, in any depth."""


def save_parts(directory: Path, tree: Tree, ranks: Grid | Replicas) -> list[Path]:
    """Write a tree by torch's distributed checkpoint.

    Args:
        directory: Of this checkpoint alone.
        tree: What is written; plain data is the same on every rank.
        ranks: The processes.

    Returns:
        Files that this rank wrote.

    Raises:
        OSError: A rank could not write; on all ranks.
        CheckpointError: Something else went wrong on one; on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tree), checkpoint_id=directory, no_dist=ranks.mesh is None)
    except CheckpointException as error:  # no Exception, so that nobody else would catch it
        raise _failure(directory, [first for first, _ in error.failures.values()]) from error
    return [
        *sorted(directory.glob(f"__{ranks.rank}_*")),
        *([directory / _INDEX] if ranks.rank == 0 else ()),
    ]


def _failure(directory: Path, errors: Sequence[BaseException]) -> Exception:
    for error in errors:
        # Where torch's own writer fails for it, the reason stands behind that.
        for found in (error, error.__cause__, error.__context__):
            if isinstance(found, OSError):
                return OSError(found.errno, found.strerror, str(directory))
    return CheckpointError(f"{directory} could not be written: {errors[0]}")


def load_parts(directory: Path, tree: Tree, ranks: Grid | Replicas) -> Tree:
    """Read in place what :func:`save_parts` wrote; arguments as there.

    Returns:
        The tree with its plain data.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from rlinf.trainers.checkpoint_reading import PlainPlanner, PlainReader

    if not (directory / _INDEX).is_file():
        raise CheckpointError(f"{directory} holds no sharded checkpoint")
    state = dict(tree)
    try:
        load(
            state,
            storage_reader=PlainReader(directory),
            planner=PlainPlanner(),
            no_dist=ranks.mesh is None,
        )
    except (CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{directory} is of another model: {reason[-1] if reason else error}"
        ) from error
    return state


def as_text(numbers: Mapping[str, Any]) -> str:
    """Small state, in which tensors may have other shapes at another time."""
    file = io.BytesIO()
    torch.save(dict(numbers), file)
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> dict[str, Any]:
    """The inverse of :func:`as_text`.

    Raises:
        CheckpointError: It holds something else than tensors and plain data.
    """
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except (pickle.UnpicklingError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the numbers of a checkpoint cannot be read: {error}") from error
    return found
