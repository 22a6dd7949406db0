"""Walks the tree of config classes by dotted keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rlinf.config.component import Component


def component_of(field: FieldInfo) -> Component | None:
    """Return the component that a field's section configures, if its type is exchangeable."""
    found = [item for item in field.metadata if isinstance(item, Component)]
    return found[0] if found else _component_in(field.annotation)


def _component_in(annotation: Any) -> Component | None:
    for argument in get_args(annotation):
        if isinstance(argument, Component):
            return argument
        found = _component_in(argument)
        if found is not None:
            return found
    return None


def section_classes(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the classes that can validate a field's section; none if it holds a plain value."""
    component = component_of(field)
    if component is not None:
        return [component.config_class(name) for name in component.names()]
    return list(_models_in(field.annotation))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def section_class(
    model_class: type[BaseModel], key: str, data: Mapping[str, Any]
) -> type[BaseModel] | None:
    """Return the class that validates section ``key`` of ``data``, or None if there is none."""
    owner: type[BaseModel] | None = model_class
    node: Any = data
    for part in key.split(".") if key else []:
        field = owner.model_fields.get(part) if owner is not None else None
        node = node.get(part) if isinstance(node, Mapping) else None
        if field is None:
            return None
        owner = _class_for(field, node)
    return owner


def _class_for(field: FieldInfo, node: Any) -> type[BaseModel] | None:
    component = component_of(field)
    if component is None:
        return next(iter(section_classes(field)), None)
    try:
        return component.class_of(node)
    except PydanticCustomError:
        return None


def child_keys(model_class: type[BaseModel]) -> list[str]:
    """Return the keys of a section, as they are written in a recipe."""
    return [field.alias or name for name, field in model_class.model_fields.items()]


def walk(
    model_class: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yield (dotted key, owner class, field) of every key, over all types of each component."""
    for name, field in model_class.model_fields.items():
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
        node = data.get(child)
        section = _class_for(field, node)
        if section is not None:
            nested = node if isinstance(node, Mapping) else {}
            found += subkeys_named(section, name, nested, f"{key}.")
    return found


def default_of(field: FieldInfo) -> Any:
    """Return a field's default in the form of a recipe; ``...`` if the field is required."""
    if field.is_required():
        return ...
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
