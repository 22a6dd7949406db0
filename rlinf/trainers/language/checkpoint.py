"""Sharded checkpoints: each rank writes its part, any number of ranks reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.errors import CheckpointError
from rlinf.trainers.language.parallel import Grid
from rlinf.trainers.language.trained import Source, TrainedModule


def save_parts(
    directory: Path,
    trained: TrainedModule,
    reference: Source | None,
    numbers: dict[str, Any],
    ranks: Grid,
) -> None:
    """Write weights, moments and the reference by torch's distributed checkpoint.

    Args:
        directory: Of this checkpoint alone.
        trained: What is trained.
        reference: The reference policy's weights, if they are kept.
        numbers: Anything else, the same on every rank.
        ranks: The processes.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _tree(trained, reference, numbers)
    save(state, checkpoint_id=directory, no_dist=ranks.world_size == 1)


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

    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"{directory} holds no sharded checkpoint")
    state = _tree(trained, reference, numbers)
    try:
        load(state, checkpoint_id=directory, no_dist=ranks.world_size == 1)
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
