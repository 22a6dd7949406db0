"""The resolved config as text, and its hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rlinf.config.yaml_source import write_yaml

_REFERENCE = re.compile(r"(\\*)\$\{")


def to_data(config: BaseModel) -> dict[str, Any]:
    """Return a config as dicts, lists and scalars, every default written out."""
    return config.model_dump(mode="json")


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of such data, each with a value that is no section with keys."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def literal(value: Any) -> Any:
    """Such data as a layer of a recipe: in it ``${`` is text, as ``\\${`` says, not a reference."""
    if isinstance(value, Mapping):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    # Of backslashes that stand before, half are read as such.
    return _REFERENCE.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def to_yaml(config: BaseModel) -> str:
    """Return a config as a recipe that reads back equal."""
    return write_yaml(literal(to_data(config)))


def config_hash(config: BaseModel) -> str:
    """Return the SHA-256 of a config's canonical JSON: equal values, equal hash, in hex."""
    text = json.dumps(to_data(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
