"""Weights alone: whether they belong to a model, and a file of them for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from rlinf.checkpoint.files import write_atomic
from rlinf.checkpoint.tree import clone_to_cpu
from rlinf.errors import CheckpointError, ConfigError

Shapes = Mapping[str, "Tensor | Sequence[int]"]


def check_compatible(
    expected: Shapes, found: Shapes, *, source: str = "the checkpoint", shown: int = 4
) -> None:
    """Compare the tensors that a model expects with those that a checkpoint (``source``) holds.

    Of each kind of difference so many names are ``shown``; the rest is counted.

    Raises:
        CheckpointError: A tensor is missing, left over, of another shape, or of whole numbers
            where the model has others.
    """
    want = {name: _shape(value) for name, value in expected.items()}
    have = {name: _shape(value) for name, value in found.items()}
    different = [
        f"{name}: {_text(have[name])} there, {_text(want[name])} in the model"
        for name in want
        if name in have and want[name] != have[name]
    ]
    whole = [
        f"{name}: {value.dtype} there, {own.dtype} in the model"
        for name, own in expected.items()
        if isinstance(own, Tensor)
        and isinstance(value := found.get(name), Tensor)
        and value.is_floating_point() != own.is_floating_point()
    ]
    missing = [f"{name} {_text(want[name])}" for name in want if name not in have]
    unknown = [f"{name} {_text(have[name])}" for name in have if name not in want]
    lines = []
    for title, entries in (
        ("of another shape", different), ("of another type", whole), ("missing", missing),
        ("unknown to the model", unknown),
    ):  # fmt: skip
        if entries:
            lines += [f"  {title}:", *(f"    {entry}" for entry in entries[:shown])]
        if len(entries) > shown:
            lines.append(f"    and {len(entries) - shown} more")
    if lines:
        raise CheckpointError("\n".join([f"{_sentence(source)} is of another model:", *lines]))


def check_finite(weights: Iterable[tuple[str, Tensor]], *, source: str, key: str) -> None:
    """Refuse, by a ConfigError of ``key``, weights with a number that is none, by name: every
    output and every update of them would be none either."""
    for name, weight in weights:
        # The sum takes no memory; a finite one says that all is.
        if not weight.is_floating_point() or weight.sum(dtype=torch.float32).isfinite():
            continue
        if not weight.isfinite().all():
            raise ConfigError(
                f"{source} holds numbers that are not finite, first in {name}: it was damaged, or "
                "its training had diverged; give another one",
                key=key,
            )


def _sentence(source: str) -> str:
    """Words begin a sentence with a capital letter, a path stays as it is."""
    return source if "/" in source else f"{source[0].upper()}{source[1:]}"


def _shape(value: Tensor | Sequence[int]) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


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
    content = safetensors.torch.save(tensors, metadata=dict(metadata or {}))
    write_atomic(path, _in_order(content) if len(metadata or {}) > 1 else content)
    return path


def _in_order(content: bytes) -> bytes:
    """A safetensors file with the metadata in its header sorted: the library writes them in another
    order each time, and files of equal weights are to be equal."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > begin - 8:  # written in another way
        return content
    return b"".join((content[:8], text.ljust(begin - 8), memoryview(content)[begin:]))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors for other programs, in a file that may be read as any new one: safetensors
    makes its own for the user alone."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(dict(tensors), path, {"format": "pt"})
    path.chmod(mode)
