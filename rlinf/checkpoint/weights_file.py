"""Whether a file of weights is there and whole; imports no torch, so that a recipe is checked in an
instant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlinf.errors import ConfigError, sought

POLICY_FILE = "policy.safetensors"
"""What a run leaves behind in its directory."""


MODEL = "model"
"""Name, in the header of such a file, of the type of the model that it is of."""
SETTINGS = "settings"
"""Name, in the same place, of the keys without which the tensors mean something else, as JSON."""
STATISTICS = "statistics"
"""Name, in the same place, of the statistics by which the model reads states and gives actions, as
JSON."""
ENVIRONMENT = "environment"
"""Name, in the same place, of what the environment said of the numbers that the policy sees and
gives, as JSON."""


STATE_SCALING = "state_scaling"
"""Name, in the same place and in the state of a trainer, of how states are scaled by their
statistics, of a model for which an earlier version left them as they are."""


def read_header(path: Path) -> dict[str, str]:
    """What such a file says beside its tensors; nothing where it cannot be read."""
    try:
        with safe_open(path.expanduser(), "numpy") as content:
            return dict(content.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def require_weights(path: Path, *, key: str, model: str | None = None) -> None:
    """Refuse, by a ConfigError of ``key``, what is no whole safetensors file, or says that it is of
    another type of ``model``; no tensor is read."""
    file = path.expanduser()
    if file.is_dir():
        hint = f"nearest: {path / POLICY_FILE}" if (file / POLICY_FILE).is_file() else _HINT
        raise ConfigError(f"{path} is a directory; {hint}", key=key)
    if not file.is_file():
        raise ConfigError(f"there is no file {sought(path)}; {_HINT}", key=key)
    try:
        with safe_open(file, "numpy") as content:
            written = (content.metadata() or {}).get(MODEL)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} holds no weights, or was cut off: {error}; {_HINT}", key=key
        ) from error
    if model is not None and written not in (None, model):
        raise ConfigError(
            f"{path} is of a model of type {written}, not {model}; nearest: model.type: {written}",
            key=key,
        )


def refuse_unscaled(scaling: str | None, said: Mapping[str, Any], *, source: str, key: str) -> None:
    """Refuse, by a ConfigError of ``key``, weights of which is ``said`` nothing of the ``scaling``
    of states, where the model has one."""
    if scaling is not None and said.get(STATE_SCALING) is None:
        raise ConfigError(
            f"{source} was trained by a version that read states as they are, and the model reads "
            f"them scaled by their statistics ({scaling}), as its publisher does: the weights "
            "would read other numbers; nearest: a new run from what that one began with",
            key=key,
        )


_HINT = f"a run leaves its policy behind in {POLICY_FILE} of its directory"
