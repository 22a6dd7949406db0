"""Where loggers are found: a literal table, and the entry points of other packages."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.monitor.loggers.base import MetricLogger

LOGGERS = {
    "jsonl": "rlinf.monitor.loggers.jsonl:JsonlLogger",
    "tensorboard": "rlinf.monitor.loggers.tensorboard:TensorBoardLogger",
    "wandb": "rlinf.monitor.loggers.wandb:WandbLogger",
    "swanlab": "rlinf.monitor.loggers.swanlab:SwanLabLogger",
    "mlflow": "rlinf.monitor.loggers.mlflow:MlflowLogger",
}

ENTRY_POINT_GROUP = "rlinf.loggers"


def logger_names() -> dict[str, str]:
    """Return every known logger and the class behind it, as ``module:Class``."""
    outside = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return {**outside, **LOGGERS}


def logger_class(name: str) -> type[MetricLogger]:
    """Return a logger's class; imports its file, not the package behind it.

    Raises:
        ConfigError: The name is unknown, or its file cannot be imported.
    """
    known = logger_names()
    if name not in known:
        raise ConfigError(f"unknown logger `{name}`; {did_you_mean(name, known)}")
    module, _, attribute = known[name].partition(":")
    try:
        found: type[MetricLogger] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"logger `{name}` is registered as {known[name]}, which cannot be imported: {error}"
        ) from error
    return found
