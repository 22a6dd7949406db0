"""Which config class and which runner execute a recipe, by its ``task:``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from rlinf.config.dump import Dumpable, to_data
from rlinf.config.load import LoadedRecipe, load_recipe
from rlinf.config.nearest import did_you_mean
from rlinf.config.registry import load_attribute
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.monitor.run_directory import CONFIG_FILE

if TYPE_CHECKING:
    from rlinf.flow.graph import Flow


class RunConfig(Dumpable, Protocol):
    """What the command line asks of a task's config, a pydantic model."""

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows of what is counted and how much it is."""

    def placement_table(self) -> list[tuple[str, ...]]:
        """Column names, then a row per component: devices, processes, residency when idle, …"""

    def check(self) -> None:
        """Refuse, within a second, what cannot run here: a missing package, a missing file."""


@dataclass(frozen=True)
class Task:
    """Where a task's config class and runner are; imported when a recipe needs them.

    Args:
        config: ``module:Class`` of the config. The module must import without torch.
        runner: Module with ``train`` and ``resume``, both (config, run directory, stop flag).
        evaluation: Module with ``evaluate``, which plays or answers what a run never saw.
        changeable: Keys, or sections, that may change when a run is resumed: those that do not
            decide what was trained so far.
        trains: Whether there is something to train; otherwise the runner has ``evaluate``, of
            (config, run directory), alone.
        runner_class: ``module:Class`` of what trains.
        training_flow: ``module:function`` that gives the flow of a config.
    """

    config: str
    runner: str
    evaluation: str
    changeable: tuple[str, ...]
    trains: bool = True
    runner_class: str = ""
    training_flow: str = ""

    def config_class(self) -> type[BaseModel]:
        """Import and return the config class."""
        found: type[BaseModel] = load_attribute(self.config)
        return found

    def runner_module(self) -> ModuleType:
        """Import and return the runner; this imports torch."""
        return importlib.import_module(self.runner)

    def flow(self, config: Any) -> Flow:
        """Import and return what a training step of a config does; this imports torch."""
        found: Flow = load_attribute(self.training_flow)(config)
        return found

    def load_runner(self) -> Any:
        """Import and return the class of the runner; this imports torch."""
        return load_attribute(self.runner_class)

    def evaluation_module(self) -> ModuleType:
        """Import and return what evaluates; this imports torch."""
        return importlib.import_module(self.evaluation)


TASKS = {
    "embodied": Task(
        config="rlinf.runners.embodied_config:EmbodiedConfig",
        runner="rlinf.runners.embodied",
        evaluation="rlinf.runners.evaluate",
        runner_class="rlinf.runners.embodied:EmbodiedRunner",
        training_flow="rlinf.runners.embodied_system:training_flow",
        changeable=(
            "runner",
            "cluster.timeout_minutes",
            "evaluation.interval",
            "evaluation.stop_at_success",
            "evaluation.video_episodes",
            "checkpoint",
            "logger",
        ),
    ),
    "reasoning": Task(
        config="rlinf.runners.reasoning_config:ReasoningConfig",
        runner="rlinf.runners.reasoning",
        evaluation="rlinf.runners.evaluate_reasoning",
        runner_class="rlinf.runners.reasoning:ReasoningRunner",
        training_flow="rlinf.runners.reasoning_system:training_flow",
        changeable=(
            "runner",
            "cluster",
            "validation.val_check_interval",
            "checkpoint",
            "logger",
        ),
    ),
    "benchmark": Task(
        config="rlinf.runners.benchmark_config:BenchmarkRunConfig",
        runner="rlinf.runners.benchmark",
        evaluation="rlinf.runners.benchmark",
        changeable=(),
        trains=False,
    ),
}


def task_of(recipe: LoadedRecipe) -> Task:
    """Return the task that a recipe names.

    Raises:
        ConfigError: ``task`` is missing or unknown.
    """
    name = recipe.data.get("task")
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    where = recipe.source_of("task")
    if name is None:
        raise ConfigError(f"{where}: `task` is missing; known: {', '.join(TASKS)}")
    raise ConfigError(f"task = {name!r} ({where}): unknown task; {did_you_mean(str(name), TASKS)}")


def task_of_run(source: Path) -> Task:
    """Return the task of a run, from its directory or one of its checkpoints.

    Raises:
        ConfigError: Its config names none.
    """
    run = source if (source / CONFIG_FILE).is_file() else source.parent.parent
    return task_of(load_recipe(str(run / CONFIG_FILE), []))


def read_config(name_or_path: str, overrides: Sequence[str]) -> tuple[Task, LoadedRecipe, Any]:
    """Return the task, the recipe and the validated config behind a command line.

    Raises:
        ConfigError: Anything about the recipe or its overrides is not legal.
    """
    recipe = load_recipe(name_or_path, overrides)
    task = task_of(recipe)
    return task, recipe, validate(task.config_class(), recipe.data, recipe)


def require_training(task: Task, name: str) -> None:
    """Refuse a recipe or run that only evaluates.

    Raises:
        ConfigError: Says which command takes it.
    """
    if not task.trains:
        raise ConfigError(f"{name} evaluates a model and trains none; use: rlinf eval RECIPE")


def refuse_fixed_keys(task: Task, before: Any, after: Any) -> None:
    """Refuse to resume a run with other values of keys that decided what was trained so far.

    Raises:
        ConfigError: Names the keys, and those that may change.
    """
    old, new = to_data(before), to_data(after)
    changed = [
        f"{key} = {_value(new, key)} (it was {_value(old, key)})"
        for key in dict.fromkeys([*_leaves(old), *_leaves(new)])
        if _value(old, key) != _value(new, key) and not _changeable(key, task.changeable)
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps what it trains; not changeable: {', '.join(changed)}. "
            f"Changeable: {', '.join(task.changeable)}. For another value start a new run."
        )


def _changeable(key: str, changeable: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in changeable)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _value(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
