"""The base of every configuration class: nothing unknown, nothing converted, nothing changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from rlinf.config.component import illegal
from rlinf.config.effects import idle_keys
from rlinf.config.reference import check_reference
from rlinf.errors import ConfigError, in_section


class StrictModel(BaseModel):
    """A configuration section.

    An unknown key is an error, a value of another type is an error (``"3"`` is not ``3``; an
    integer is accepted where a float is expected), so is a number that is not finite, and an
    instance is immutable. The docstring under an attribute is the description that ``rlinf
    explain`` prints.

    Values come from YAML, which has no tuples and no paths. A list is therefore accepted for a
    ``tuple`` field, text for a ``Path`` field, and a member's value for an ``Enum`` field.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    only_with: ClassVar[Mapping[str, str]] = {}
    """Keys that have an effect beside another key alone, by name: ``other`` or ``one | other``, of
    which one is then neither null, false, 0 nor empty, or ``other: value | value``. Without it they
    keep their default. A subclass adds its own."""

    not_read: ClassVar[frozenset[str]] = frozenset()
    """Paths of the section that no run reads: what it writes to, or executes."""

    code_files: ClassVar[frozenset[str]] = frozenset()
    """Keys whose text names something in a Python file, ``FILE.py:NAME``, or in a module."""

    def own_modules(self) -> Mapping[str, Path]:
        """Files of modules that are the user's own and decide what the section means, by name."""
        return {}

    def may_be_told(self, key: str, was: Any, value: Any) -> bool:
        """Whether a run in whose configuration a dotted key ``was`` something else, None where it
        was not written, may be told this value later: a former version went by it all the same."""
        del key, was, value
        return False

    def unwritten(self, key: str) -> Any:
        """What a key is where it is not written."""
        return (
            type(self).model_fields[key].get_default(call_default_factory=True, validated_data={})
        )

    @model_validator(mode="after")
    def _refuse_idle_keys(self) -> Self:
        for problem in idle_keys(self):
            raise problem
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _accept_yaml_forms(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if field is None:
            return value
        if field.annotation == dict[str, Any]:  # the types of its values are not known here
            _refuse_what_json_changes(value)
        return _from_yaml(value, field.annotation)

    def check(self) -> None:
        """Refuse what is legal but cannot run on this machine, within a second.

        A section overrides this to look for a package, a file or an interpreter, and raises a
        UserError that says how to get it. The key of a ConfigError is relative to the section.
        What a section of a component names as its ``implementation`` must be there.
        """
        self._check_implementations()
        for name in type(self).model_fields:
            value = getattr(self, name)
            sections = {name: value}
            if isinstance(value, tuple):
                sections = {f"{name}.{place}": each for place, each in enumerate(value)}
            elif isinstance(value, Mapping):
                sections = {f"{name}.{key}": each for key, each in value.items()}
            for key, section in sections.items():
                if isinstance(section, StrictModel):
                    with in_section(key):
                        section.check()

    def _check_implementations(self) -> None:
        """Of the class of a component, the references that it has to name, or does."""
        own = type(self)
        for name in sorted(own.__class_vars__ & {"implementation", "q_implementation"}):
            reference = getattr(own, name, "")
            if reference is None:
                continue
            try:
                check_reference(reference)
            except ConfigError as error:
                where = f"{name} of {own.__module__}.{own.__qualname__}"
                raise ConfigError(f"{where}: {error}", key="type") from error


def _refuse_what_json_changes(value: Any, key: str = "") -> None:
    """Refuse, anywhere in free options, a number that is not finite, which JSON makes null, and a
    key that is no text, which it makes one: a function would not find it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, item in items:
        text = name if isinstance(name, str) else json.dumps(name, default=str).strip('"')
        inner = f"{key}.{text}" if key else text
        if isinstance(value, Mapping) and not isinstance(name, str):
            raise illegal(inner, "the keys of options are texts", hint=f'in quotes: "{text}"')
        _refuse_what_json_changes(item, inner)
    if isinstance(value, float) and not math.isfinite(value):
        raise illegal(key, "must be a finite number", hint="in place of infinity 1e9")


def _from_yaml(value: Any, annotation: Any) -> Any:
    """Return ``value`` in the Python form that ``annotation`` asks for, unchanged if in doubt."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _from_yaml(value, arguments[0])
    if origin is Union or origin is UnionType:
        fits = isinstance(value, str) and str in arguments
        for argument in () if fits else arguments:
            converted = _from_yaml(value, argument)
            if type(converted) is not type(value) or get_origin(argument) is list:
                return converted
    elif isinstance(value, list) and (origin or annotation) in (tuple, list):
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        kinds = arguments[:1] * len(value) if many or origin is list else arguments
        items = zip_longest(value, kinds[: len(value)], fillvalue=Any)
        return (origin or annotation)(_from_yaml(item, kind) for item, kind in items)
    elif isinstance(value, Mapping) and origin in (dict, Mapping) and len(arguments) == 2:
        value = {key: _from_yaml(item, arguments[1]) for key, item in value.items()}
    elif isinstance(value, str) and annotation is Path:
        value = Path(value)
    elif isinstance(value, str) and isinstance(annotation, type) and issubclass(annotation, Enum):
        value = next((member for member in annotation if member.value == value), value)
    return value
