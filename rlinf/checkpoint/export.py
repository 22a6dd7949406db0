"""Writes the weights of a policy alone, for programs that are not this one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from rlinf.checkpoint.files import write_atomic
from rlinf.checkpoint.tree import clone_to_cpu


def export_weights(
    path: Path | str, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write ``weights`` to one safetensors file, replacing it in one step.

    Tied weights are written once per name, so that the file needs no knowledge of the model.
    The file's directory is made; its header carries ``metadata``.

    Returns:
        The path that was written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = clone_to_cpu(list(weights.values()))
    tensors = dict(zip(weights, copies, strict=True))
    write_atomic(path, safetensors.torch.save(tensors, metadata=dict(metadata or {})))
    return path
