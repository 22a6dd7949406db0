"""Sharded checkpoints: each rank writes its part, any number of ranks reads them.

The format is that of torch's distributed checkpoint. Reading runs no code from the files: of its
pickled index only the classes of that format are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.errors import CheckpointError
from rlinf.trainers.language.parallel import Grid
from rlinf.trainers.language.trained import Source, TrainedModule

_INDEX = ".metadata"


def save_parts(
    directory: Path,
    trained: TrainedModule,
    reference: Source | None,
    numbers: dict[str, Any],
    ranks: Grid,
) -> list[Path]:
    """Write weights, moments and the reference by torch's distributed checkpoint.

    Args:
        directory: Of this checkpoint alone.
        trained: What is trained.
        reference: The reference policy's weights, if they are kept.
        numbers: Anything else, the same on every rank.
        ranks: The processes.

    Returns:
        Files that this rank wrote.

    Raises:
        OSError: A rank could not write; on all ranks.
        CheckpointError: Something else went wrong on one; on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _tree(trained, reference, numbers)
    alone = ranks.world_size == 1
    try:
        save(state, checkpoint_id=directory, process_group=ranks.group, no_dist=alone)
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


def load_parts(
    directory: Path,
    trained: TrainedModule,
    reference: Source | None,
    numbers: dict[str, Any],
    ranks: Grid,
) -> dict[str, Any]:
    """Read in place what :func:`save_parts` wrote; arguments as there.

    Returns:
        The other numbers.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from rlinf.trainers.language.checkpoint_reading import PlainPlanner, PlainReader

    if not (directory / _INDEX).is_file():
        raise CheckpointError(f"{directory} holds no sharded checkpoint")
    state = _tree(trained, reference, numbers)
    try:
        load(
            state,
            storage_reader=PlainReader(directory),
            planner=PlainPlanner(),
            process_group=ranks.group,
            no_dist=ranks.world_size == 1,
        )
    except (CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{directory} is of another model: {reason[-1] if reason else error}"
        ) from error
    if reference:
        for name in trained.named:
            trained.fill(name, reference, trained.whole(state["reference"][name]))
    trained.optimizer.steps = int(state["steps"])
    trained.changed()
    loaded: dict[str, Any] = state["numbers"]
    return loaded


def _tree(
    trained: TrainedModule, reference: Source | None, numbers: dict[str, Any]
) -> dict[str, Any]:
    """Parts that share memory with what they are parts of, so that reading fills them."""
    tree: dict[str, Any] = {
        kind: {name: trained.part(name, source) for name in trained.named}
        for kind, source in trained.sources().items()
    }
    if reference:
        parts: dict[str, Tensor] = {name: trained.part(name, reference) for name in trained.named}
        tree["reference"] = parts
    return {**tree, "steps": trained.optimizer.steps, "numbers": numbers}
