"""What a metric logger must do, which there are, and the section of a recipe that picks some."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.effects import refuse_unused
from rlinf.config.nearest import did_you_mean
from rlinf.config.registry import Registry
from rlinf.errors import MissingPackageError

Ending = Literal["finished", "interrupted", "failed"]
"""How a run can end; one that was interrupted may go on."""


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
    remedy: ClassVar[str] = ""
    """Of a hosted service, what to do where it refuses a run; then what :meth:`__init__` raises is
    told as the user's mistake."""
    ending: Ending = "finished"
    """How the run ended, once :meth:`close` is called."""

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
    "jsonl": "rlinf.monitor.metrics_log:JsonlLogger",
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


class LoggerConfig(StrictModel):
    """Where the numbers of a run are sent, besides ``metrics.jsonl``, which is always written."""

    backends: tuple[str, ...] = ("tensorboard",)
    """Any of tensorboard, wandb, swanlab, mlflow, jsonl, and what other packages add."""

    project: str = "rlinf"
    """Project, or experiment, under which hosted loggers file the run."""

    name: str | None = None
    """Name of the run there; null: the name of the run directory."""

    mode: Literal["online", "offline"] = "online"
    """Whether hosted loggers send while training or write to the run directory alone."""

    @model_validator(mode="after")
    def _are_hosted(self) -> Self:
        if set(self.backends) <= {"tensorboard", "jsonl"}:
            refuse_unused(self, ("project", "name", "mode"), without="backends: [wandb]")
        return self

    @field_validator("backends")
    @classmethod
    def _known(cls, backends: tuple[str, ...]) -> tuple[str, ...]:
        known = REGISTRY.names()
        for name in backends:
            if name not in known:
                raise illegal("", f"unknown logger `{name}`", hint=did_you_mean(name, known))
        return backends

    def check(self) -> None:
        """Look for the packages of the loggers.

        Raises:
            ConfigError: A logger of another package cannot be used.
            MissingPackageError: A package is not installed.
        """
        for name in self.backends:
            REGISTRY.load(name).check_packages()
