"""The resolved config as text, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rlinf.config.yaml_source import write_yaml


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


def to_yaml(config: BaseModel) -> str:
    """Return a config as a recipe that reads back equal."""
    return write_yaml(to_data(config))


def config_hash(config: BaseModel) -> str:
    """Return the SHA-256 of a config's canonical JSON: equal values, equal hash, in hex."""
    text = json.dumps(to_data(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
