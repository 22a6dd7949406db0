"""What evaluations of finished runs share: which checkpoint, its name, and where results go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rlinf.checkpoint.reading import Checkpoint
from rlinf.data.evaluation_files import HashedSpec, SpecifiedResult
from rlinf.flow.placed_config import PlacedConfig
from rlinf.runners.run_loading import load_run

ConfigT = TypeVar("ConfigT", bound=PlacedConfig)
ResultT = TypeVar("ResultT", bound=SpecifiedResult)


def evaluate_and_compare(
    source: Path,
    other: Path | None,
    config_class: type[ConfigT],
    evaluate: Callable[[ConfigT, Checkpoint, bool], ResultT],
    compare: Callable[[ResultT, ResultT], Any],
) -> ResultT:
    """Evaluate a run, and print how it compares with another one.

    Args:
        source: A run directory, or one of its checkpoints.
        other: Another one; None: there is nothing to compare with.
        config_class: Of the task of both.
        evaluate: Evaluates a checkpoint; is told whether it is that of ``source``.
        compare: Of the other result and this one.

    Raises:
        CheckpointError: There is no good checkpoint.
    """
    result = evaluate(*load_run(source, config_class), True)
    if other is not None:
        print(compare(evaluate(*load_run(other, config_class), False), result))
    return result


def run_of(checkpoint: Checkpoint) -> Path:
    """Directory of the run that a checkpoint belongs to."""
    return checkpoint.path.parent.parent


def name_of(checkpoint: Checkpoint) -> str:
    """What a checkpoint is called in results."""
    return f"{run_of(checkpoint).name} step {checkpoint.step}"


def keep_result(result: SpecifiedResult, spec: HashedSpec, checkpoint: Checkpoint) -> str:
    """Write a result into the directory of its run, and print it; returns the stem of its file."""
    stem = f"spec_{spec.sha256[:12]}_step_{checkpoint.step:08d}"
    file = run_of(checkpoint) / "evaluations" / f"{stem}.json"
    result.save(file)
    print(f"{name_of(checkpoint)}: {result}\nwritten to {file}", flush=True)
    return stem
