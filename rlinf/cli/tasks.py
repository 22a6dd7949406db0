"""Which task executes a recipe, by its ``task:``, and what may change when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf.config.load import LoadedRecipe, load_recipe
from rlinf.config.names_elsewhere import names_here, task_here
from rlinf.config.nearest import did_you_mean
from rlinf.config.schema import section_class, value_at
from rlinf.config.validate import validate
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.monitor.run_directory import CONFIG_FILE
from rlinf.runners.evaluation import origin_of, run_of
from rlinf.runners.task import REGISTRY, Task, require_task

AnyTask = type[Task[Any]]


def task_names() -> list[str]:
    """Names of all tasks: the project's own, then those of packages outside."""
    return list(dict.fromkeys([*REGISTRY.table, *REGISTRY.names()]))


def task_of(recipe: LoadedRecipe) -> AnyTask:
    """Import and return the task that a recipe names."""
    name, known = recipe.data.get("task"), task_names()
    if isinstance(name, str) and name in known:
        task = REGISTRY.load(name)
        if not task.__module__.startswith("rlinf."):
            require_task(task, name)
        return task
    where = recipe.source_of("task")
    if name is None:
        raise ConfigError(
            f"{where}: `task` is missing; known: {', '.join(known)}{_foreign(recipe.data)}"
        )
    raise ConfigError(f"task = {name!r} ({where}): unknown task; {did_you_mean(str(name), known)}")


def task_of_run(source: Path) -> AnyTask:
    """Return the task of a run, from its directory or one of its checkpoints."""
    return task_of(load_recipe(str(config_of_run(source)), []))


def of_other_types(config: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides of a run's configuration, in which every default is written: a component of
    another type has none of the keys that only the one that it replaces knows."""
    recipe, former = load_recipe(str(config), []), list[str]()
    for each in overrides:
        key, _, value = each.partition("=")
        section, _, last = key.rpartition(".")
        present: Any = recipe.data
        for part in section.split("."):
            present = present.get(part) if isinstance(present, Mapping) else None
        of_type = present.get("type") if isinstance(present, Mapping) else None
        if last == "type" and of_type not in (None, value) and f"~{section}" not in overrides:
            other = load_recipe(str(config), [each]).data
            found = section_class(task_of(recipe).config_class, section, other)
            shared = {"type", *(found.model_fields if found is not None else ())}
            former += [f"~{section}.{name}" for name in present if name not in shared]
    return [*former, *overrides]


def _foreign(data: Mapping[str, Any]) -> str:
    """What keys that other projects have are called here, where a recipe has some."""
    task_type = value_at(data, "runner.task_type")
    if near := task_here(task_type):
        return f". For its `runner.task_type: {task_type}` the nearest is {near}"
    found = {key: names_here(key) for key in data}
    told = [f"`{key}` is {' or '.join(ours[:2])}" for key, ours in found.items() if ours]
    return f". Of another project? Here {', '.join(told)}" if told else ""


def config_of_run(source: Path) -> Path:
    """Return the file of a run's configuration, from its directory or one of its checkpoints."""
    return run_of(source) / CONFIG_FILE


def read_config(
    name_or_path: str, overrides: Sequence[str], *, evaluated: bool = False
) -> tuple[AnyTask, LoadedRecipe, Any]:
    """Return the task, the recipe and the validated config behind a command line that trains, or
    by which what is trained is ``evaluated``."""
    recipe = load_recipe(name_or_path, overrides)
    task = task_of(recipe)
    config = validate(
        task.config_class, recipe.data, recipe, elsewhere=_elsewhere, evaluated=evaluated
    )
    return task, recipe, config


def _elsewhere(name: str, section: str) -> str:
    """What keys of other tasks hold what a user calls so in a recipe of one that has none."""
    from rlinf.config.explain import in_others

    configs = {}
    for task in task_names():
        with suppress(ConfigError, MissingPackageError):  # of a package outside that is broken
            configs[task] = REGISTRY.load(task).config_class
    return in_others(configs, name, section)


def of_moved_model(overrides: Sequence[str] | None) -> list[str]:
    """Words that say where files of a run's model lie by now; ConfigError of any other key, of
    which nothing is read."""
    for each in overrides or []:
        if not each.startswith("model."):
            raise ConfigError(
                f"{each} has no effect here; nearest: model.path=PATH, where the model that the "
                "run began with was moved"
            )
    return list(overrides or [])


def require_training(task: AnyTask, name: str) -> None:
    """Refuse a recipe or run that only evaluates."""
    if not task.trains:
        raise ConfigError(f"{name} evaluates a model and trains none; use: rlinf eval RECIPE")


def check_changed(source: Path, overrides: Sequence[str], *, why: str) -> None:
    """Refuse to change what a run was trained with where its policy plays again, and what cannot
    run here."""
    from rlinf.config.validate import check

    task, recipe, config = read_config(str(config_of_run(source)), overrides, evaluated=True)
    origin = origin_of(task, run_of(source))
    origin.refuse_other_config(config, task.changeable_evaluation, why=why, evaluated=True)
    check(task.for_evaluation(config), recipe)
