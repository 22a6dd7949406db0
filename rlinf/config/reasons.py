"""Why a value is not legal, and the nearest one that is, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rlinf.config.nearest import did_you_mean, join_choices
from rlinf.config.schema import child_keys, section_class, subkeys_named

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section (key: value)",
    "mapping_type": "a section (key: value)",
    "model_type": "a section (key: value)",
    "model_attributes_type": "a section (key: value)",
    "dataclass_type": "a section (key: value)",
    "path_type": "a path",
    "is_instance_of": "a path",
    "none_required": "null",
}

_YAML_WORDS = {
    **dict.fromkeys(("yes", "on", "y", "True", "TRUE"), "true"),
    **dict.fromkeys(("no", "off", "n", "False", "FALSE"), "false"),
}


def reason(
    model_class: type[BaseModel],
    key: str,
    value: Any,
    details: ErrorDetails,
    data: Mapping[str, Any],
) -> str:
    """Return what is wrong with ``key`` and what would be right.

    Args:
        model_class: Class of the whole config.
        key: Dotted key of the problem.
        value: What the key holds.
        details: The problem as pydantic reports it.
        data: The whole config as plain data.
    """
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model_class, key, data)
    if kind == "missing":
        return "is required, but nothing sets it"
    if kind in ("literal_error", "enum"):
        return _not_a_choice(value, str(context["expected"]))
    if kind in _BOUNDS:
        return _out_of_bounds(kind, value, context)
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}{_type_hint(kind, value)}"
    message = str(context.get("error", details["msg"]))
    return message if kind in ("illegal", "value_error") else message[:1].lower() + message[1:]


def show(value: Any) -> str:
    """Return a value as it would be written in a recipe, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown_key(model_class: type[BaseModel], key: str, data: Mapping[str, Any]) -> str:
    parent, _, name = key.rpartition(".")
    owner = section_class(model_class, parent, data)
    known = [] if owner is None else child_keys(owner)
    hint = did_you_mean(name, known)
    elsewhere = [other for other in subkeys_named(model_class, name, data) if other != key]
    if elsewhere and "did you mean" not in hint:
        hint = f"did you mean `{elsewhere[0]}`? {hint}"
    section = f"section `{parent}`" if parent else "the config"
    component = _type_of(parent, data)
    if component:
        section += f" of type {component}"
    return f"{section} has no key `{name}`; {hint}".rstrip("; ")


def _type_of(section: str, data: Mapping[str, Any]) -> str:
    node: Any = data
    for part in section.split(".") if section else []:
        node = node.get(part) if isinstance(node, Mapping) else None
    name = node.get("type") if isinstance(node, Mapping) else None
    return name if isinstance(name, str) else ""


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
    bound = context[name]
    text = f"must be {word} {bound}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"{text}; nearest: {bound}"
    if isinstance(value, int) and isinstance(bound, int) and kind != "multiple_of":
        return f"{text}; nearest: {bound + 1 if kind == 'greater_than' else bound - 1}"
    return text


def _type_hint(kind: str, value: Any) -> str:
    """Return how the value differs from the type, and how to write it if that can be told."""
    hint = ""
    if isinstance(value, str):
        hint = _text_hint(kind, value)
    elif value is None:
        hint = "; it is empty"
    elif isinstance(value, Mapping):
        hint = f", not a section with the keys {', '.join(map(str, value))}"
    elif isinstance(value, float) and kind.startswith("int") and math.isfinite(value):
        hint = f"; nearest: {round(value)}"
    elif kind in ("list_type", "tuple_type"):
        hint = f", for example [{show(value)}]"
    elif kind == "string_type" and isinstance(value, int | float):
        hint = f'; in quotes: "{show(value)}"'
    elif isinstance(value, bool):
        hint = f", not {show(value)}"
    return hint


def _text_hint(kind: str, value: str) -> str:
    if value in ("None", "none", "nil"):
        return "; for no value write null"
    if kind == "bool_type" and value in _YAML_WORDS:
        return f", not text; write {_YAML_WORDS[value]}"
    if kind in ("int_type", "float_type") and _is_number(value):
        return f", not text; without quotes: {value}"
    if kind in ("list_type", "tuple_type"):
        return f", for example [{value}]"
    return ", not text"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
