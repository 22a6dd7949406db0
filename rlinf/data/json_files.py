"""Settings in files of JSON, as they lie beside weights; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError


def read_settings(file: Path, *, key: str = "") -> dict[str, Any]:
    """The object in a file; a ConfigError of ``key`` where it cannot be read or is no object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} cannot be read: {why}", key=key) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ConfigError(f"{file} cannot be read: expected an object, not {kind}", key=key)
    return found
