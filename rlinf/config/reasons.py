"""Why a value is not legal, and the nearest one that is, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlinf.config.names_elsewhere import (
    as_written_here,
    names_here,
    names_in_section,
    not_here,
)
from rlinf.config.nearest import did_you_mean, join_choices
from rlinf.config.schema import (
    child_keys,
    default_of,
    section_class,
    subkeys_named,
    value_at,
)

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
    "too_short": ("must hold at least", "min_length"),
}

_TYPES = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"),
        "a section (key: value)",
    ),
    **dict.fromkeys(("path_type", "is_instance_of"), "a path"),
    "none_required": "null",
}

_YAML_WORDS = {
    **dict.fromkeys(("yes", "on", "y", "True", "TRUE"), "true"),
    **dict.fromkeys(("no", "off", "n", "False", "FALSE"), "false"),
}


Elsewhere = Callable[[str, str], str]
"""Says of a name, and of the section that it stands in, which keys of other configs hold that."""


def nowhere(name: str, section: str) -> str:
    """Nothing is known of other configs."""
    del name, section
    return ""


def reason(
    model_class: type[BaseModel],
    key: str,
    value: Any,
    details: ErrorDetails,
    data: Mapping[str, Any],
    *,
    elsewhere: Elsewhere = nowhere,
) -> str:
    """Return what is wrong with ``key``, which holds ``value``, and what would be right.

    ``model_class`` and ``data`` are of the whole config; ``details`` is pydantic's report.
    """
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        last = details["loc"][-1]
        dotted = _dotted(last, value) if isinstance(last, str) and "." in last else ""
        return dotted or _unknown_key(model_class, key, data, elsewhere)
    if kind == "missing":
        field = _field(model_class, key, data)
        return required(field.description if field is not None else None)
    if kind in ("literal_error", "enum"):
        return _not_a_choice(value, str(context["expected"]))
    if kind in _BOUNDS:
        return _out_of_bounds(kind, value, context)
    if kind in _TYPES:
        field = _field(model_class, key, data)
        return f"must be {_TYPES[kind]}{_of_type(kind, key, value, field)}"
    message = str(context.get("error", details["msg"]))
    return message if kind in ("illegal", "value_error") else message[:1].lower() + message[1:]


def required(description: str | None) -> str:
    """What is said of a key that has to be set; the first sentence of what is told about it."""
    told = first_sentence(description or "").rstrip(".")
    return "is required, but nothing sets it" + (f": {told}" if told else "")


def as_shown(text: str) -> str:
    """A docstring with one backtick, as all messages have it, where its markup has two."""
    return text.replace("``", "`")


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or comment, in one line."""
    paragraph = " ".join(as_shown(text).strip().partition("\n\n")[0].split())
    # "et al. 2015" goes on.
    found = re.match(r".*?\.(?= \D)", paragraph)
    return found[0] if found else paragraph


def _field(model_class: type[BaseModel], key: str, data: Mapping[str, Any]) -> FieldInfo | None:
    parent, _, name = key.rpartition(".")
    owner = section_class(model_class, parent, data)
    return None if owner is None else owner.model_fields.get(name)


def _of_type(kind: str, key: str, value: Any, field: FieldInfo | None) -> str:
    """What is said behind the type that a value should have."""
    if value is None:
        optional = field is not None and isinstance(default_of(field), Mapping)
        told = f"; leave it out (`~{key}` drops what a recipe says)" if optional else ""
        return f"; it is empty{told}{_default(field)}"
    count = _items(field.annotation) if field is not None and kind == "tuple_type" else 0
    return f" of {count}{_default(field)}" if count > 1 else _type_hint(kind, value)


def _items(annotation: Any) -> int:
    """How many items a list of this type has; 0 where that is open, or it is no list."""
    inner = get_args(annotation)
    if get_origin(annotation) is tuple:
        return 0 if ... in inner else len(inner)
    return max(map(_items, inner), default=0)


def _default(field: FieldInfo | None) -> str:
    value = ... if field is None else default_of(field)
    return "" if value is ... or isinstance(value, Mapping) else f"; the default is {show(value)}"


def show(value: Any) -> str:
    """Return a value as it would be written in a recipe, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dotted(name: str, value: Any) -> str:
    text = show(value)
    for part in reversed(name.split(".")):
        text = f"{{{part}: {text}}}"
    return f"a key with dots is one name in a file; write `{text[1:-1]}`"


def _unknown_key(
    model_class: type[BaseModel], key: str, data: Mapping[str, Any], others: Elsewhere
) -> str:
    parent, _, name = key.rpartition(".")
    owner = section_class(model_class, parent, data)
    hint = did_you_mean(name, [] if owner is None else child_keys(owner))
    around = next((part for part in reversed(parent.split(".")) if not part.isdecimal()), "")
    same = [other for other in subkeys_named(model_class, name, data) if other != key]
    below = [other for other in same if parent and other.startswith(f"{parent}.")]
    alike = _called_here(model_class, key, around, data, same)
    if told := not_here(name):
        hint = told
    elif alike:
        hint = f"here that is {', '.join(as_written_here(*each) for each in alike.items())}"
    elif below:  # of the same section: the same name says more than a like one
        hint = f"did you mean `{below[0]}`?"
    elif names_in_section(name, around) and (told := others(name, around)):
        hint = f"{told}; {hint}"
    elif same and "did you mean" not in hint:
        found = name if name in same else same[0]
        top = f"`{name}` is a key of the recipe itself" if found == name else None
        hint = f"{top}; {hint}" if top else f"did you mean `{found}`? {hint}"
    elif "did you mean" not in hint and (told := others(name, around)):
        hint = f"{told}; {hint}"
    section = f"section `{parent}`" if parent else "the config"
    owner_data = value_at(data, parent)
    component = owner_data.get("type") if isinstance(owner_data, Mapping) else None
    if isinstance(component, str) and name != "type":
        section += f" of type {component}"
    return f"{section} has no key `{name}`; {hint}".rstrip("; ")


def _called_here(
    model_class: type[BaseModel], key: str, around: str, data: Mapping[str, Any], same: list[str]
) -> dict[str, str]:
    """The keys of this config that hold what others call so, each with the name of theirs.

    A section that is known as such, by its name in the one ``around`` or as the ``same`` of ours,
    is itself told, however its values are called; or the one value below it, if it has just one.
    """
    parent, _, name = key.rpartition(".")
    section = value_at(data, key)
    values = [*_last_names(section, name)] if isinstance(section, Mapping) else []
    exact = _present(model_class, names_in_section(name, around), data)
    inner = {here: theirs for theirs, its in values
             for here in _present(model_class, names_here(theirs, its), data)}  # fmt: skip
    if homes := exact or (same if values else []):
        within = {here: theirs for here, theirs in inner.items()
                  if any(f"{here}.".startswith(f"{home}.") for home in homes)}  # fmt: skip
        if len(values) == 1 and within:
            return within
        return dict.fromkeys(exact, name)
    if names_in_section(name, around):
        return {}  # it is known, but nothing here holds it
    plain = dict.fromkeys(_present(model_class, names_here(name, around), data), name)
    found = inner or plain
    return {here: found.get(here, name) for here in _nearest(model_class, parent, [*found], data)}


def _present(model_class: type[BaseModel], keys: list[str], data: Mapping[str, Any]) -> list[str]:
    """Of ``keys`` those that a config has, in each entry of a list of sections."""
    return [
        found
        for key in keys
        for found in subkeys_named(model_class, key.rpartition(".")[2], data)
        if ".".join(part for part in found.split(".") if not part.isdecimal()) == key
    ]


def _nearest(
    model_class: type[BaseModel], parent: str, keys: list[str], data: Mapping[str, Any]
) -> list[str]:
    """Of ``keys`` those of the section ``parent``, which may be another one of their kind; else
    those of the section that it lies in, else all."""
    kind = section_class(model_class, parent, data) if parent else None
    own = [key for key in keys if key.startswith(f"{parent}.")]
    if not own and kind is not None:
        split = (key.rpartition(".") for key in keys)
        own = [f"{parent}.{last}" for section, _, last in split
               if _akin(kind, section_class(model_class, section, data))]  # fmt: skip
    top = parent.partition(".")[0]
    return own or [key for key in keys if key.startswith(f"{top}.")] or keys


def _akin(one: type[BaseModel], other: type[BaseModel] | None) -> bool:
    return other is not None and (issubclass(one, other) or issubclass(other, one))


def _last_names(section: Mapping[str, Any], called: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the values of a section that is not known, at any depth, each with that of
    the section around it."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _last_names(value, name)
        else:
            yield name, called


def _not_a_choice(value: Any, expected: str) -> str:
    """Return the choices, from pydantic's form ``'a', 'b' or None``."""
    parts = expected.replace(" or ", ", ").split(", ")
    choices = ["null" if part == "None" else part.strip("'") for part in parts]
    if len(choices) == 1:
        return f"must be {choices[0]}"
    close = did_you_mean(str(value), choices, list_up_to=0)
    hint = f"; {close}" if close.startswith("did you mean") else ""
    return f"must be one of: {join_choices(choices)}{hint}"


def _out_of_bounds(kind: str, value: Any, context: Mapping[str, Any]) -> str:
    word, name = _BOUNDS[kind]
    if kind == "too_short":
        least = context[name]
        return f"{word} {least} item{'s' if least > 1 else ''}"
    bound, nearest = context[name], None
    if word in (">=", "<="):
        nearest = bound
    elif word in (">", "<") and isinstance(value, int) and isinstance(bound, int):
        nearest = bound + 1 if word == ">" else bound - 1
    return f"must be {word} {bound}" + ("" if nearest is None else f"; nearest: {nearest}")


def _type_hint(kind: str, value: Any) -> str:
    """Return how the value differs from the type, and how to write it if that can be told."""
    hint = ""
    match kind, value:
        case _, str():
            hint = _text_hint(kind, value)
        case _, Mapping():
            hint = f", not a section with the keys {', '.join(map(str, value))}"
        case "int_type" | "int_from_float", float() if math.isfinite(value):
            hint = f"; nearest: {round(value)}"
        case "list_type" | "tuple_type", _:
            hint = f", for example [{show(value)}]"
        case "string_type", int() | float():
            hint = f'; in quotes: "{show(value)}"'
        case _, bool():
            hint = f", not {show(value)}"
    return hint


def _text_hint(kind: str, value: str) -> str:
    if value in ("None", "none", "nil"):
        return "; for no value write null"
    if kind == "bool_type" and value in _YAML_WORDS:
        return f", not text; write {_YAML_WORDS[value]}"
    if kind in ("list_type", "tuple_type"):
        return f", for example [{value.strip('()')}]"  # a tuple as Python writes it
    if kind in ("int_type", "float_type"):
        with suppress(ValueError):
            if math.isfinite(float(value)):
                return f", not text; without quotes: {value}, or by ${{oc.decode:…}}"
    return ", not text"
