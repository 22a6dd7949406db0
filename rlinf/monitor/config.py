"""Where the numbers of a run are sent."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.monitor.loggers.base import REGISTRY


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
