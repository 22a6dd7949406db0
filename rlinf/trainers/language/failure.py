"""Keeps the batch that stopped a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from rlinf.algorithms.batch import Batch
from rlinf.trainers.skipped import Keep


def batch_keeper(directory: Path | None, section: str) -> Keep | None:
    """Writes the batch that stopped a run, named by its section of the config.

    Args:
        directory: Where; None: nowhere, as on ranks other than 0.
        section: The section.
    """
    if directory is None:
        return None

    def keep(batch: Batch, step: int, metrics: Mapping[str, float]) -> Path:
        path = directory / f"{section}_batch_of_step_{step}"
        save_batch(path, batch, step=step, metrics=metrics)
        return path.with_name(path.name + ".safetensors")

    return keep


def save_batch(path: Path, batch: Batch, *, step: int, metrics: Mapping[str, float]) -> None:
    """Write the tensors of a batch as ``path``.safetensors, the rest as ``path``.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: column.contiguous() for name, column in batch.tensors().items()}
    save_file(tensors, path.with_name(path.name + ".safetensors"))
    about = {
        "step": step,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "sequences": len(batch),
        "version": batch.version,
    }
    path.with_name(path.name + ".json").write_text(json.dumps(about, indent=2) + "\n")
