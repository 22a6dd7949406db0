"""Keys that have an effect beside other keys alone: one rule for all sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal

if TYPE_CHECKING:
    from rlinf.config.base import StrictModel


def idle_keys(section: StrictModel) -> Iterator[PydanticCustomError]:
    """What stands against keys of a section that :attr:`StrictModel.only_with` says are idle."""
    for key, needed in _rules(type(section)).items():
        other, _, values = needed.partition(": ")
        found = getattr(section, other)
        if _written(found) in values.split(" | ") if values else found:
            continue
        yield from unused(section, [key], without=needed.replace(" | ", " or "))


@cache
def _rules(owner: type[StrictModel]) -> Mapping[str, str]:
    """Of a class and all that it is made from; the nearest counts."""
    found: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        found |= each.__dict__.get("only_with", {})
    return found


def unused(
    section: StrictModel, keys: Iterable[str], *, without: str, at: str = ""
) -> Iterator[PydanticCustomError]:
    """What stands against keys of another value than their default, which have no effect here.

    Args:
        section: It has the keys.
        keys: Of them those that it has not are passed over.
        without: With what they would have an effect, as that is written in a recipe.
        at: Key of the section, and a point.
    """
    for key in keys:
        if key in type(section).model_fields and getattr(section, key) != section.unwritten(key):
            hint = f"write {without}, or leave it at {_written(section.unwritten(key))}"
            yield illegal(f"{at}{key}", f"has no effect without {without}", hint=hint)


def refuse_unused(section: StrictModel, keys: Iterable[str], *, without: str) -> None:
    """Raise the first of :func:`unused`."""
    for problem in unused(section, keys, without=without):
        raise problem


def _written(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
