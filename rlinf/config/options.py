"""Options of a component that are a plain dataclass, seen as a config section.

Env adapters must import without pydantic; here their dataclasses become models to be explained."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, get_type_hints

from pydantic import Field, create_model

from rlinf.config.base import StrictModel
from rlinf.config.registry import Registry


@dataclass(frozen=True)
class ComponentOptions:
    """Annotation of a field that holds the options of the component that its section is about.

    The ``type`` beside the field names one of the registry.
    """

    registry: Registry[Any]
    attribute: str = "Options"  # of a component's class: the dataclass of its options

    def model_of(self, name: str, component: type[Any]) -> type[OptionsModel]:
        """Return the options of a component as a section."""
        return _model(name, getattr(component, self.attribute))


class OptionsModel(StrictModel):
    """Base of the sections that are made of dataclasses."""

    component_type: ClassVar[str] = ""
    """Name of the component that has these options."""


@cache
def _model(name: str, options: type[Any]) -> type[OptionsModel]:
    hints, descriptions = get_type_hints(options), field_descriptions(options)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        arguments: dict[str, Any] = {"description": descriptions.get(field.name, "")}
        if field.default_factory is not dataclasses.MISSING:
            arguments["default_factory"] = field.default_factory
        elif field.default is not dataclasses.MISSING:
            arguments["default"] = field.default
        fields[field.name] = (hints[field.name], Field(**arguments))
    model = create_model(options.__name__, __base__=OptionsModel, **fields)
    model.component_type = name
    return model


def field_descriptions(options: type[Any]) -> dict[str, str]:
    """Return what a dataclass says of its fields: docstrings below them, or its Args section.

    Fields that it has from another dataclass are described there.
    """
    found: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # a class without a file
            source = ""
        found.update(_args_section(owner.__doc__ or ""))
        for node in ast.parse(source).body[:1]:
            for pair in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                match pair:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        found[name] = inspect.cleandoc(text)
    return found


def _args_section(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the entries below ``Args:``: ``name: text`` with deeper lines that continue it."""
    _, heading, rest = inspect.cleandoc(docstring).partition("Args:\n")
    section = re.split(r"\n(?=\S)", rest)[0] if heading else ""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(section).strip()):
        name, colon, text = entry.partition(":")
        if colon:
            yield name.split(" ")[0], " ".join(text.split())
