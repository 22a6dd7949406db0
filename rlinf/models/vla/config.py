"""What the recipe sections of all vision-language-action models have; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.errors import ConfigError
from rlinf.models.config import ModelConfig


class VLAConfig(ModelConfig):
    """A policy whose architecture and first weights are those of a published model."""

    half_precision = True

    path: Path | None = None
    """Directory of the model in its published format; null: `preset` says what is made."""
    preset: Literal["tiny"] | None = None
    """Make a model of random weights, which depend on the seed alone: `tiny` has the published
    architecture with at most 3 million parameters; null: `path` names one."""
    weights: Path | None = None
    """Weights to go on with, a file `policy.safetensors` as runs leave it behind, which holds what
    was trained of this model; null: those of `path` or `preset`."""
    tokenizer: Path | None = None
    """Directory or file of the tokenizer; null: the one in `path`, or of words for a preset."""
    cameras: tuple[str | None, ...] = Field(default=("main_images",), min_length=1)
    """Image observations in the order of the model's views; null leaves a view out. An observation
    of several pictures fills as many views."""
    statistics: Path | None = None
    """File of the statistics by which states and actions are normalised; null: those in `path`, or
    the bounds of the environment's actions."""
    statistics_key: str | None = None
    """Which of several sets of statistics holds; null: the only one."""
    value_head: Annotated[tuple[int, ...], Field(min_length=0)] = (512, 128)
    """Widths of the hidden layers of the value head, which begins afresh."""
    detach_values: bool = False
    """Train the value head alone by the error of the values, not what it reads from."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.path is None) == (self.preset is None):
            given = "neither is" if self.path is None else "both are"
            raise illegal(
                "path",
                f"{given} given of path and preset",
                hint="the directory of a published model, or preset: tiny",
            )
        return self

    @property
    def starting_weights(self) -> Path | None:
        """File of weights that a run left behind."""
        return self.weights

    def check(self) -> None:
        """Look for what is named, before anything is read."""
        if self.path is not None and not (self.path.expanduser() / "config.json").is_file():
            found = "is a file" if self.path.expanduser().is_file() else "has no config.json"
            raise ConfigError(
                f"{self.path} {found}; nearest: the directory of a published model, or `weights` "
                "for the policy.safetensors of a run",
                key="path",
            )
        for key in ("weights", "statistics"):
            named = getattr(self, key)
            if named is not None and not named.expanduser().is_file():
                raise ConfigError(f"there is no file {named}", key=key)
        if self.tokenizer is not None and not self.tokenizer.expanduser().exists():
            raise ConfigError(f"there is no tokenizer {self.tokenizer}", key="tokenizer")
