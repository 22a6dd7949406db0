"""Keeps the batch that stopped a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import RunFailure
from rlinf.trainers.language.core import Update


def check_skipped(
    updates: list[Update],
    batch: Any,
    *,
    bound: int,
    step: int,
    section: str,
    directory: Path | None,
) -> None:
    """Stop the run where too many updates of a phase were skipped.

    Args:
        updates: Of the phase so far.
        batch: The global batch of the last one.
        bound: How many may be skipped.
        step: Number of the phase.
        section: Of the config, in the message.
        directory: Where the batch is written; None: nowhere, as on ranks other than 0.

    Raises:
        RunFailure: There were more.
    """
    skipped = sum(update.outcome == "skipped" for update in updates)
    if updates[-1].outcome != "skipped" or skipped <= bound:
        return
    where = ""
    if directory is not None:
        path = directory / f"{section}_batch_of_step_{step}"
        save_batch(path, batch, step=step, metrics=updates[-1].metrics)
        where = f"; the batch is in {path}.safetensors"
    raise RunFailure(
        f"{skipped} updates of training phase {step} had a loss or gradient that is not finite; "
        f"lower {section}.optim.lr or {section}.optim.max_grad_norm{where}"
    )


def save_batch(path: Path, batch: Any, *, step: int, metrics: Mapping[str, float]) -> None:
    """Write the tensors of a batch as ``path``.safetensors, the rest as ``path``.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: c.contiguous() for name, c in columns.items() if isinstance(c, Tensor)}
    save_file(tensors, path.with_name(path.name + ".safetensors"))
    about = {
        "step": step,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "sequences": len(batch),
        "other": {name: c for name, c in columns.items() if isinstance(c, int | str)},
    }
    path.with_name(path.name + ".json").write_text(json.dumps(about, indent=2) + "\n")
