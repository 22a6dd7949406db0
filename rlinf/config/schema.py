"""Walks the tree of config classes by dotted keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rlinf.config.component import Component
from rlinf.config.options import ComponentOptions
from rlinf.errors import ConfigError

Marker = TypeVar("Marker", Component, ComponentOptions)


def component_of(field: FieldInfo) -> Component | None:
    """Return the component that a field's section configures, if its type is exchangeable."""
    return _marker(Component, field.metadata, field.annotation)


def options_of(field: FieldInfo) -> ComponentOptions | None:
    """Return whose options a field holds, if they are those of an exchangeable component."""
    return _marker(ComponentOptions, field.metadata, field.annotation)


def _marker(kind: type[Marker], metadata: Iterable[Any], annotation: Any) -> Marker | None:
    for item in metadata:
        if isinstance(item, kind):
            return item
    for argument in get_args(annotation):
        found = _marker(kind, [argument], argument)
        if found is not None:
            return found
    return None


def section_classes(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the classes that can describe a field's section; none if it holds a plain value.

    A component that cannot be imported is left out; :func:`broken_components` has it.
    """
    marker = component_of(field) or options_of(field)
    if marker is None:
        return list(_models_in(field.annotation))
    return [
        marker.model_of(name, found) if isinstance(marker, ComponentOptions) else found
        for name, found in marker.registry.usable()
        if not isinstance(found, ConfigError)
    ]


def broken_components(field: FieldInfo) -> list[str]:
    """Return a line for each component that a field could name, but that cannot be used."""
    marker = component_of(field) or options_of(field)
    usable = marker.registry.usable() if marker is not None else ()
    return [str(problem) for _, problem in usable if isinstance(problem, ConfigError)]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType, list, tuple, dict, Mapping):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def section_class(
    model_class: type[BaseModel], key: str, data: Mapping[str, Any]
) -> type[BaseModel] | None:
    """Return the class that validates section ``key`` of ``data``, or None if there is none."""
    owner: type[BaseModel] | None = model_class
    node: Any = data
    field: FieldInfo | None = None
    entry: FieldInfo | None = None
    for part in key.split(".") if key else []:
        if isinstance(node, list):  # of sections of one class
            node = value_at(node, part)
            owner = None if field is None else _class_for(field, node)
            continue
        field = entry or (owner.model_fields.get(part) if owner is not None else None)
        node = node.get(part) if isinstance(node, Mapping) else None
        if field is None:
            return None
        entry = None if entry else entry_of(field)
        owner = None if entry else _class_for(field, node)
    return owner


def entry_of(field: FieldInfo) -> FieldInfo | None:
    """Return what a field holds under each name, if it maps names of the user's choice to that."""
    arguments = get_args(field.annotation)
    if get_origin(field.annotation) not in (dict, Mapping) or len(arguments) != 2:
        return None
    return FieldInfo.from_annotation(arguments[1])


def _class_for(field: FieldInfo, node: Any) -> type[BaseModel] | None:
    component = component_of(field)
    if component is None:  # of several, the one that has most of the keys
        keys = set(node) if isinstance(node, Mapping) else set()
        models = _models_in(field.annotation)
        return max(models, key=lambda model: len(keys & set(model.model_fields)), default=None)
    try:
        return component.class_of(node)
    except PydanticCustomError:
        return None


def _options_class(field: FieldInfo, data: Mapping[str, Any]) -> type[BaseModel] | None:
    """The class of options of the component that the ``type`` beside them names, if any does."""
    options, name = options_of(field), data.get("type")
    if options is None or name not in options.registry.names():
        return None
    with suppress(ConfigError):
        return options.model_of(str(name), options.registry.load(str(name)))
    return None


def value_at(data: Any, key: str) -> Any:
    """Return what plain data holds under a dotted key, the data itself for none; else None."""
    for part in key.split(".") if key else []:
        if isinstance(data, list):
            data = dict(zip(map(str, range(len(data))), data, strict=True))
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def in_every_entry(data: Any, key: str, above: str = "") -> Iterator[str]:
    """Yield the keys that a key without places stands for: below ``above``, one per entry of the
    lists of sections on its way."""
    value = value_at(data, above)
    part, _, rest = key.partition(".")
    if isinstance(value, list):
        for place in range(len(value)):
            yield from in_every_entry(data, key, f"{above}.{place}")
    elif part:
        yield from in_every_entry(data, rest, f"{above}.{part}".lstrip("."))
    else:
        yield above


def child_keys(model_class: type[BaseModel]) -> list[str]:
    """Return the keys of a section, as they are written in a recipe."""
    fields = model_class.model_fields.items()
    return [field.alias or name for name, field in fields if not field.exclude]


def walk(
    model_class: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yield (dotted key, owner class, field) of every key, over all types of each component."""
    for name, field in model_class.model_fields.items():
        if field.exclude:  # follows from other keys
            continue
        key = f"{prefix}{field.alias or name}"
        yield key, model_class, field
        for section in section_classes(field):
            yield from walk(section, f"{key}.")


def subkeys_named(
    model_class: type[BaseModel], name: str, data: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return the dotted keys that end in ``name``, among the component types that ``data`` uses."""
    found = []
    for child, field in model_class.model_fields.items():
        key = f"{prefix}{child}"
        if child == name:
            found.append(key)
        entry, node = entry_of(field), data.get(child)
        below = {f"{key}.": (field, node)}
        if entry is not None and options_of(field) is None:
            entries = node if isinstance(node, Mapping) else {}
            below = {f"{key}.{own}.": (entry, value) for own, value in entries.items()}
        elif isinstance(node, list):
            below = {f"{key}.{place}.": (field, value) for place, value in enumerate(node)}
        for path, (part, value) in below.items():
            section = _class_for(part, value) or _options_class(part, data)
            if section is not None:
                nested = value if isinstance(value, Mapping) else {}
                found += subkeys_named(section, name, nested, path)
    return found


def default_of(field: FieldInfo) -> Any:
    """Return a field's default in the form of a recipe; ``...`` if the field is required."""
    if field.is_required():
        return ...
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
