"""Sections with a ``type:`` key, each validated by the config class of the component it names.

That class is imported only when its section is validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rlinf.config.registry import Registry
from rlinf.errors import ConfigError


@dataclass(frozen=True, eq=False)  # hashed by identity: a registry holds a table
class Component:
    """Annotation of a field that holds the section of an exchangeable component.

    Example::

        algorithm: Annotated[AlgorithmConfig, Component(REGISTRY)]
    """

    registry: Registry[Any]

    def section(self, value: Any) -> BaseModel:
        """Return the validated section; raises pydantic's errors."""
        return value if isinstance(value, BaseModel) else self.class_of(value).model_validate(value)

    def class_of(self, value: Any) -> type[BaseModel]:
        """Return the config class that the ``type`` of a section names."""
        if not isinstance(value, Mapping):
            raise PydanticCustomError("component_section", "must be a section with a `type` key")
        name = value.get("type")
        if name is None:
            why = f"the section does not say which {self.registry.kind} it configures"
            raise illegal("type", why, hint=f"known: {', '.join(self.registry.names())}")
        try:
            found: type[BaseModel] = self.registry.load(str(name))
        except ConfigError as error:
            raise illegal("type", str(error)) from error
        _require_type(self.registry.kind, str(name), found)
        return found

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Validate and write the section by the class of its type, not by the annotated base."""
        return core_schema.no_info_plain_validator_function(
            self.section,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda section, info: section.model_dump(mode=info.mode),
                info_arg=True,
                return_schema=core_schema.any_schema(),
            ),
        )


def _require_type(kind: str, name: str, found: type[BaseModel]) -> None:
    """Refuse the class of a component that does not say which one it configures."""
    field = found.model_fields.get("type")
    if field is None or name not in (field.default, *get_args(field.annotation)):
        raise illegal(
            "type",
            f"{kind} `{name}` is broken: {found.__module__}.{found.__qualname__} does not say so",
            hint=f'write in it: type: Literal["{name}"] = "{name}"',
        )


def illegal(key: str, why: str, *, hint: str = "") -> PydanticCustomError:
    """Return the error that a rule between several keys raises in a model validator.

    ``key`` is the one to name, dotted, relative to the validated section; ``hint`` the nearest
    legal value, or what else to change::

        raise illegal("global_batch_size", "does not divide 10 samples", hint="nearest: 5")
    """
    text = f"{why}; {hint}" if hint else why
    # Braces would be read as placeholders of the message template.
    return PydanticCustomError("illegal", "{text}", {"text": text, "key": key})
