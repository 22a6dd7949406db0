"""What a key means: its type, default, legal values, and which recipes set it to what."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf.config.load import find_recipe, load_recipe, recipe_names
from rlinf.config.names_elsewhere import as_written_here, names_here, not_here
from rlinf.config.nearest import did_you_mean, nearest_names
from rlinf.config.options import OptionsModel
from rlinf.config.reasons import as_shown, first_sentence, show
from rlinf.config.schema import (
    broken_components,
    component_of,
    default_of,
    entry_of,
    in_every_entry,
    options_of,
    section_classes,
    value_at,
    walk,
)
from rlinf.errors import ConfigError

_MOST_ELSEWHERE = 3
_BASE = re.compile(r"""^base: *["']?([^"'\s#]+)""", re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """One key of one config class."""

    key: str  # dotted
    owner: str  # type of the component that has the key, empty outside of component sections
    kind: str  # its type in words
    default: str  # as written in a recipe; `required` if there is none
    legal: str  # range or choices, empty if the type says all
    description: str
    children: tuple[tuple[str, str], ...]
    """Keys of the section with the first sentence of their descriptions."""
    settings: tuple[tuple[str, str], ...]  # ready recipes that set the key, with the value
    broken: tuple[str, ...]
    """Components that the section could name, but that cannot be used; a line for each."""


def explain(
    model_class: type[BaseModel], key: str, *, task: str | None = None
) -> list[Explanation]:
    """Return what ``key`` of a whole config means, once per component type that has it.

    Its last part alone stands for the keys that end in it, where they are not too many. Only
    recipes of ``task`` are said to set the key; None: all are.

    Raises:
        ConfigError: No key is named so; the message has the nearest.
    """
    entries = list(walk(model_class))
    names = list(dict.fromkeys(name for name, _, _ in entries))
    key = _without_own_names(key, {name: field for name, _, field in entries})
    try:
        keys = _full_keys(key, names)
    except ConfigError as error:
        broken = [line for _, _, field in entries for line in broken_components(field)]
        raise ConfigError("\n".join(dict.fromkeys([str(error), *broken]))) from error
    found = [(name, owner, field) for name, owner, field in entries if name in keys]
    word = key.rpartition(".")[2]
    every = {name: _ready(name) for name in recipe_names() if word in _text(find_recipe(name))}
    recipes = {n: data for n, data in every.items() if task is None or data.get("task") == task}
    # One class can be reached twice, as the train and the eval section of an env can.
    unique = {(name, id(owner)): (name, owner, field) for name, owner, field in found}
    return [_explanation(*each, recipes) for each in unique.values()]


@functools.cache
def _text(recipe: Path) -> str:
    """A ready recipe and its bases as written: what they do not name, none of them sets."""
    text = recipe.read_text(encoding="utf-8")
    base = _BASE.search(text)
    return text if base is None else text + _text(find_recipe(base[1], beside=recipe.parent))


@functools.cache
def _ready(recipe: str) -> Mapping[str, Any]:
    """What a ready recipe says; all of them are asked for every task that has a key."""
    return load_recipe(recipe).data


def _without_own_names(key: str, fields: Mapping[str, FieldInfo]) -> str:
    """A key without places in lists and names of the user's choice."""
    kept: list[str] = []
    names_follow = False
    for part in key.split("."):
        if ".".join([*kept, part]) in fields or not (names_follow or part.isdecimal()):
            kept.append(part)
            field = fields.get(".".join(kept))
            names_follow = field is not None and entry_of(field) is not None
        else:
            names_follow = False
    return ".".join(kept)


def _full_keys(key: str, names: list[str]) -> list[str]:
    if key in names:
        return [key]
    ending = [name for name in names if name.endswith(f".{key}")]
    if len(ending) > _MOST_ELSEWHERE:
        raise ConfigError(f"several keys end in `{key}`: {_listed(ending)}")
    if ending:
        return ending
    section, _, name_there = key.rpartition(".")
    here = [n for n in names_here(name_there, section.rpartition(".")[2]) if n in names]
    if told := not_here(name_there):
        raise ConfigError(f"no key `{key}`; {told}")
    if here:
        written = ", ".join(as_written_here(each, name_there) for each in here)
        raise ConfigError(f"no key `{key}`; here that is {written}")
    last = {name: name.rpartition(".")[2] for name in names}
    alike = nearest_names(key.rpartition(".")[2], set(last.values()))
    close = nearest_names(key, names) or [name for name in names if last[name] in alike]
    if close:
        raise ConfigError(f"no key `{key}`; did you mean {_listed(close[:3])}?")
    raise ConfigError(unlike_any(key, [name for name in names if "." not in name]))


def in_others(configs: Mapping[str, type[BaseModel]], name: str, section: str) -> str:
    """Which keys of several configs, by the names of their tasks, are called ``name``, or hold what
    other projects call so in a section of theirs; empty where none does, or too many to tell."""
    ours = names_here(name, section)
    found: dict[str, dict[str, str]] = {}
    for task, model_class in configs.items():
        for key, owner, _ in walk(model_class):
            if key in ours or key.rpartition(".")[2] == name:
                component = _component_type(owner)
                found.setdefault(key, {})[component or task] = "type" if component else "task"
    keys = [key for key in ours if key in found] or list(found)
    told = [
        f"{as_written_here(key, name)} ({next(iter(found[key].values()))} {', '.join(found[key])})"
        for key in keys
    ]
    return f"elsewhere that is {', '.join(told)}" if 0 < len(told) <= _MOST_ELSEWHERE else ""


def unlike_any(key: str, sections: list[str]) -> str:
    """What to say of a key that is like no other one: which sections there are."""
    hint = did_you_mean(key, sections, list_up_to=len(sections))
    return f"no key `{key}`; {hint}; names of types: rlinf list algorithms, models, …"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _explanation(
    key: str, owner: type[BaseModel], field: FieldInfo, recipes: Mapping[str, Any]
) -> Explanation:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, Mapping) else {}
    sections = section_classes(field)
    component, options = component_of(field), options_of(field)
    kind = kind_of(field.annotation)
    if component is not None:
        kind = f"section of one {component.registry.kind}"
    elif options is not None:
        kind = f"options of one {options.registry.kind}"
    default = default_of(field)
    text = "required" if default is ... else _default_text(default, bool(sections))
    return Explanation(
        key=key,
        owner=_component_type(owner),
        kind=kind,
        default=str(extra.get("default_text", text)),  # given where the rest of the recipe decides
        legal=f"type: {', '.join(component.registry.names())}" if component else _legal(field),
        description=as_shown(field.description or ""),
        children=tuple(_children(sections, tagged=bool(component or options))),
        settings=tuple(_settings(key, owner, recipes)),
        broken=tuple(broken_components(field)),
    )


def _default_text(default: Any, is_section: bool) -> str:
    if is_section and isinstance(default, Mapping):
        return "its keys' defaults"
    if isinstance(default, list | tuple):
        return f"[{', '.join(_default_text(item, False) for item in default)}]"
    return str(default) if isinstance(default, str | Path) else show(default)


def _component_type(owner: type[BaseModel]) -> str:
    if issubclass(owner, OptionsModel):
        return owner.component_type
    field = owner.model_fields.get("type")
    choices = get_args(field.annotation) if field is not None else ()
    return str(choices[0]) if len(choices) == 1 and isinstance(choices[0], str) else ""


def _children(sections: list[type[BaseModel]], *, tagged: bool) -> Iterator[tuple[str, str]]:
    for section in sections:
        tag = f" ({_component_type(section)})" if tagged else ""
        for name, field in section.model_fields.items():
            stated = name == "type" and tagged and not issubclass(section, OptionsModel)
            if stated or field.exclude:
                continue
            yield f"{field.alias or name}{tag}", first_sentence(field.description or "")


def _settings(
    key: str, owner: type[BaseModel], recipes: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    component, (section_key, _, name) = _component_type(owner), key.rpartition(".")
    found = [(r, data, place) for r, data in recipes.items()
             for place in in_every_entry(data, section_key)]  # fmt: skip
    for recipe, data, place in found:
        section = typed = value_at(data, place)
        if issubclass(owner, OptionsModel):  # in a section beside the type that they belong to
            typed = value_at(data, place.rpartition(".")[0])
        if not isinstance(section, Mapping) or isinstance(section.get(name, {}), Mapping):
            continue
        if not component or typed.get("type") == component:
            yield recipe, show(section[name])


_WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "any value",
}


def kind_of(annotation: Any) -> str:
    """Return a type in words: ``list of whole number``, ``number or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    words = _WORDS.get(annotation, "section")
    if origin is Annotated:
        words = kind_of(arguments[0])
    elif origin in (Union, UnionType):
        words = " or ".join(kind_of(argument) for argument in arguments)
    elif origin is Literal:
        words = " | ".join(show(choice).strip("'") for choice in arguments)
    elif origin in (tuple, list):
        kinds = dict.fromkeys(kind_of(item) for item in arguments if item is not Ellipsis)
        words = f"list of {' and '.join(kinds)}"
    elif origin is dict and len(arguments) == 2:
        words = f"section of any keys, each {kind_of(arguments[1])}"
    return words


def _legal(field: FieldInfo) -> str:
    """Return the bounds of a number or the lengths of a list."""
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
    words |= {"min_length": "at least", "max_length": "at most", "pattern": "pattern"}
    bounds = []
    for item in (*field.metadata, *_inner_metadata(field.annotation)):
        values = {name: getattr(item, name, None) for name in words}
        bounds += [f"{words[name]} {value}" for name, value in values.items() if value is not None]
    return " and ".join(bounds)


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ():
        if get_origin(argument) is Annotated:
            for item in get_args(argument)[1:]:
                yield from getattr(item, "metadata", None) or [item]
