"""Keys that have an effect beside other keys alone: one rule for all sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal


def idle_keys(section: object, at: str = "") -> Iterator[PydanticCustomError]:
    """What stands against keys of a section that its ``only_with`` says are idle, see
    :attr:`StrictModel.only_with <rlinf.config.base.StrictModel.only_with>`.

    Args:
        section: A model, or a dataclass.
        at: Key of the section, and a point.
    """
    rules: dict[str, str] = {}
    for owner in reversed(type(section).__mro__):  # the nearest counts
        rules |= owner.__dict__.get("only_with", {})
    for key, needed in rules.items():
        others, _, values = needed.partition(": ")
        found = [getattr(section, other) for other in others.split(" | ")]
        if any(_written(each) in values.split(" | ") if values else each for each in found):
            continue
        yield from unused(section, [key], without=needed.replace(" | ", " or "), at=at)


def unused(
    section: Any, keys: Iterable[str], *, without: str, at: str = ""
) -> Iterator[PydanticCustomError]:
    """What stands against keys of another value than their default, which have no effect here.

    Args:
        section: It has the keys; see :func:`idle_keys`.
        keys: They have no effect.
        without: With what they would have one, as that is written in a recipe.
        at: Key of the section, and a point.
    """
    for key in keys:
        default = _default(section, key)
        if getattr(section, key) != default:
            hint = f"write {without}, or leave it at {_written(default)}"
            yield illegal(f"{at}{key}", f"has no effect without {without}", hint=hint)


def _default(section: Any, key: str) -> Any:
    if is_dataclass(section):
        return next(field.default for field in fields(section) if field.name == key)
    return section.unwritten(key)


def refuse_unused(section: Any, keys: Iterable[str], *, without: str, at: str = "") -> None:
    """Raise the first of :func:`unused`."""
    for problem in unused(section, keys, without=without, at=at):
        raise problem


def _written(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
