"""Says before anything is loaded whether a checkpoint belongs to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from rlinf.errors import CheckpointError

Shapes = Mapping[str, "Tensor | Sequence[int]"]


def check_compatible(
    expected: Shapes, found: Shapes, *, source: str = "the checkpoint", shown: int = 4
) -> None:
    """Compare the tensors that a model expects with those that a checkpoint holds.

    Args:
        expected: Tensors or shapes of the model, by name.
        found: Tensors or shapes of the checkpoint, by name.
        source: How the message calls the checkpoint.
        shown: Names listed per kind of difference; the rest is counted.

    Raises:
        CheckpointError: A tensor is missing, left over or of another shape.
    """
    want = {name: _shape(value) for name, value in expected.items()}
    have = {name: _shape(value) for name, value in found.items()}
    different = [
        f"{name}: {_text(have[name])} there, {_text(want[name])} in the model"
        for name in want
        if name in have and want[name] != have[name]
    ]
    lines = [
        *_listed("of another shape", different, shown),
        *_listed("missing", (f"{n} {_text(want[n])}" for n in want if n not in have), shown),
        *_listed("unknown to the model", (f"{n} {_text(have[n])}" for n in have if n not in want),
                 shown),
    ]  # fmt: skip
    if lines:
        raise CheckpointError(
            "\n".join([f"{source[0].upper()}{source[1:]} is of another model:", *lines])
        )


def _shape(value: Tensor | Sequence[int]) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _listed(title: str, entries: Iterable[str], shown: int) -> list[str]:
    entries = list(entries)
    if not entries:
        return []
    more = [f"    and {len(entries) - shown} more"] if len(entries) > shown else []
    return [f"  {title}:", *(f"    {entry}" for entry in entries[:shown]), *more]
