"""Records of named classes as trees of plain values, which is all that a checkpoint holds.

Whoever reads says which classes may be built, so that loading a checkpoint runs no other code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rlinf.errors import CheckpointError

_CLASS, _FIELDS = "record", "fields"


def to_tree(value: Any) -> Any:
    """Dataclasses, also within lists, tuples and dicts, as dicts that say their class."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: to_tree(getattr(value, field.name)) for field in fields(value)}
        return {_CLASS: type(value).__name__, _FIELDS: found}
    if isinstance(value, Mapping):
        found = {key: to_tree(item) for key, item in value.items()}
        plain = not isinstance(value, Counter) and _CLASS not in found
        return found if plain else {_CLASS: type(value).__name__, _FIELDS: found}
    if isinstance(value, list | tuple):
        items = [to_tree(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def from_tree(tree: Any, classes: tuple[type, ...]) -> Any:
    """What :func:`to_tree` took apart; of dataclasses only ``classes`` may be built.

    Raises:
        CheckpointError: The tree holds a record of another class, or one whose fields differ.
    """
    known = {kind.__name__: kind for kind in (*classes, Counter, dict)}

    def build(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(build(item) for item in value)
        if not isinstance(value, Mapping):
            return value
        if _CLASS not in value:
            return {key: build(item) for key, item in value.items()}
        kind = known.get(value[_CLASS])
        found = {key: build(item) for key, item in value[_FIELDS].items()}
        if kind is None:
            raise CheckpointError(f"the checkpoint holds a record of '{value[_CLASS]}', unknown")
        if not is_dataclass(kind):
            return kind(found)
        try:
            return kind(**found)
        except TypeError as error:
            raise CheckpointError(
                f"the checkpoint holds another {kind.__name__}: {error}"
            ) from error

    return build(tree)
