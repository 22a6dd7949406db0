"""What a metric logger must do, and what it is told about the run."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlinf.config.registry import Registry
from rlinf.errors import MissingPackageError


@dataclass(frozen=True)
class LoggerContext:
    """What a logger is told about the run."""

    run_dir: Path
    """The run's directory; a logger writes to a directory of its own name in it."""
    project: str = "rlinf"
    """Project, or experiment, that the run belongs to."""
    name: str = "run"
    """Name of the run."""
    mode: Literal["online", "offline"] = "online"
    """Whether a hosted service is reached while training."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration of the run."""


class MetricLogger(ABC):
    """One destination of metrics. A subclass is built as ``Logger(context)``.

    The package behind it is imported when it is built, not before. An exception of :meth:`log`
    costs the run this logger and nothing else.
    """

    title: ClassVar[str]
    """Name in messages."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Import names of the packages that it needs."""
    extra: ClassVar[str] = ""
    """Extra of this project that installs them."""

    @abstractmethod
    def __init__(self, context: LoggerContext) -> None: ...

    @classmethod
    def check_packages(cls) -> None:
        """Look for the packages without importing them.

        Raises:
            MissingPackageError: One is not installed.
        """
        for package in cls.packages:
            if importlib.util.find_spec(package) is None:
                raise MissingPackageError(package, cls.extra, f"The logger {cls.title}")

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """Record the metrics of one step; values may be NaN or infinite."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """The run goes on after ``step``: what was logged beyond it will be logged again."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left."""


def remembered_id(path: Path, new_id: str) -> str:
    """Return the id in a file, so that a resumed run goes on as the same run of a service."""
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new_id)
    return new_id


LOGGERS = {
    "jsonl": "rlinf.monitor.loggers.jsonl:JsonlLogger",
    "tensorboard": "rlinf.monitor.loggers.tensorboard:TensorBoardLogger",
    "wandb": "rlinf.monitor.loggers.wandb:WandbLogger",
    "swanlab": "rlinf.monitor.loggers.swanlab:SwanLabLogger",
    "mlflow": "rlinf.monitor.loggers.mlflow:MlflowLogger",
}

REGISTRY: Registry[MetricLogger] = Registry(
    "logger",
    "rlinf.loggers",
    LOGGERS,
    MetricLogger,  # type: ignore[type-abstract]  # it is compared with, not built
)
