"""From plain data to a validated config, or to one message that names every problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlinf.config.base import StrictModel
from rlinf.config.load import LoadedRecipe
from rlinf.config.reasons import Elsewhere, nowhere, reason, show
from rlinf.errors import ConfigError, in_section

Model = TypeVar("Model", bound=BaseModel)
EVALUATED = "evaluated"
"""Key of the context of validation: whether nothing is trained."""
_ABSENT = object()


def validate(
    model_class: type[Model],
    data: Mapping[str, Any],
    source: LoadedRecipe | str,
    *,
    elsewhere: Elsewhere = nowhere,
    evaluated: bool = False,
) -> Model:
    """Return the validated config of plain data.

    ``source`` is the recipe, for the origin of each value; or a name for all of them. ``elsewhere``
    is asked for a key that this config does not have, nor one like it. Where what it trains is only
    ``evaluated``, nothing is refused that stands against training alone.

    Raises:
        ConfigError: Lists every problem with file, key, value, reason and nearest legal value.
    """
    try:
        return model_class.model_validate(dict(data), context={EVALUATED: evaluated})
    except ValidationError as error:
        recipe = source if isinstance(source, LoadedRecipe) else LoadedRecipe(source, dict(data))
        raise ConfigError(_message(model_class, error, recipe, elsewhere)) from error


def check(config: StrictModel, recipe: LoadedRecipe, *, section: str | None = None) -> None:
    """Refuse what cannot run here, see :meth:`StrictModel.check`, and name a value's origin.

    With a ``section`` that one alone.
    """
    try:
        if section is None:
            config.check()
        else:
            with in_section(section):
                getattr(config, section).check()
    except ConfigError as error:
        if not error.key:
            raise
        value: Any = recipe.data
        for part in error.key.split("."):
            value = _child(value, part)
        problem = f"{_head(error.key, value, recipe)}{error.reason}"
        raise ConfigError(f"{recipe.name}: 1 problem\n  {problem}") from error


def refused_keys(error: ValidationError, data: Mapping[str, Any]) -> list[str]:
    """The dotted keys that an error of validation names; none of a rule that names no key."""
    found = (_key_and_value(details, data)[0] for details in error.errors(include_url=False))
    return [key for key in dict.fromkeys(found) if key]


def _message(
    model_class: type[BaseModel],
    error: ValidationError,
    recipe: LoadedRecipe,
    elsewhere: Elsewhere,
) -> str:
    """Return one line per key; the branches of a union share the line of their key."""
    reasons: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for details in error.errors(include_url=False):
        key, value = _key_and_value(details, recipe.data)
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # items that are wrong, each with a line of its own, were not counted
        values.setdefault(key, value)
        text = reason(model_class, key, value, details, recipe.data, elsewhere=elsewhere)
        if text not in reasons.setdefault(key, []):
            reasons[key].append(text)
    lines = [f"{_head(key, values[key], recipe)}{', or '.join(reasons[key])}" for key in reasons]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{recipe.name}: {count}", *(f"  {line}" for line in lines)])


def _head(key: str, value: Any, recipe: LoadedRecipe) -> str:
    if not key:
        return ""  # a rule that names no key names its culprits itself
    written = "" if value is _ABSENT or isinstance(value, Mapping) else f" = {show(value)}"
    origin = str(recipe.source_of(key))
    # The message opens with the name of the whole.
    return f"{key}{written}{'' if origin == recipe.name else f' ({origin})'}: "


def _key_and_value(details: ErrorDetails, data: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the dotted key of an error, without the union branches that pydantic adds to it."""
    location: list[str | int] = list(details["loc"])
    named = details.get("ctx", {}).get("key") if details["type"] == "illegal" else None
    if named:
        location += str(named).split(".")
    # What an error names may be absent, and the last part of its place only where it is missing.
    first_absent = len(details["loc"]) - (details["type"] == "missing")
    may_be_absent = bool(named) or details["type"] == "missing"
    node: Any = data
    parts: list[str] = []
    for position, part in enumerate(location):
        child = _child(node, part)
        if child is not _ABSENT:
            node = child
            parts.append(str(part))
        elif may_be_absent and position >= first_absent:
            return ".".join([*parts, *(str(name) for name in location[position:])]), _ABSENT
    return ".".join(parts), node


def _child(node: Any, part: str | int) -> Any:
    if isinstance(node, Mapping):
        return node.get(part, _ABSENT)
    if isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
        return node[int(part)]
    return _ABSENT
