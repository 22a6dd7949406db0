"""``rlinf list KIND``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer

from rlinf.cli.screen import show_table
from rlinf.config.load import find_recipe, recipe_names
from rlinf.config.nearest import did_you_mean
from rlinf.config.registry import Registry, load_attribute
from rlinf.errors import ConfigError


class Kind(StrEnum):
    """What can be listed."""

    RECIPES = "recipes"
    ENVS = "envs"
    MODELS = "models"
    ALGORITHMS = "algorithms"
    ENGINES = "engines"
    REWARDS = "rewards"
    TOOLS = "tools"
    LOGGERS = "loggers"
    TASKS = "tasks"


# The registries of each kind, and what each is for where there are several; the docstring of a
# registered class says what it is.
REGISTRIES = {
    Kind.ENVS: {"": "rlinf.envs.base:REGISTRY"},
    Kind.MODELS: {"": "rlinf.models.config:REGISTRY"},
    Kind.ALGORITHMS: {"": "rlinf.algorithms.base_config:REGISTRY"},
    Kind.ENGINES: {"text": "rlinf.engines.config:REGISTRY"},
    Kind.REWARDS: {"": "rlinf.rewards.protocol:REGISTRY"},
    Kind.TOOLS: {"": "rlinf.agents.tool:REGISTRY"},
    Kind.LOGGERS: {"": "rlinf.monitor.loggers.base:REGISTRY"},
    Kind.TASKS: {"": "rlinf.runners.task:REGISTRY"},
}


def list_names(
    kind: Annotated[str, typer.Argument(metavar="|".join(Kind), help="What to list.")],
) -> None:
    """List recipes, environments, models, algorithms, engines, rewards, tools, loggers, tasks."""
    if kind not in list(Kind):
        raise ConfigError(f"`{kind}` is nothing that can be listed; {did_you_mean(kind, Kind)}")
    rows = list(_rows(Kind(kind)))
    show_table("", ("",) * len(rows[0]), rows)


def _rows(kind: Kind) -> Iterator[tuple[str, ...]]:
    if kind is Kind.RECIPES:
        yield from ((name, _opening_comment(name)) for name in recipe_names())
        return
    from rlinf.config.reasons import first_sentence

    for purpose, reference in REGISTRIES[kind].items():
        registry: Registry[object] = load_attribute(reference)
        for name, found in registry.usable():
            broken = isinstance(found, ConfigError)
            text = str(found) if broken else first_sentence(found.__doc__ or "")
            families = getattr(found, "families", None)  # of policies that an algorithm trains
            use = " and ".join(families) if families else purpose
            yield (name, use, text) if use else (name, text)


def _opening_comment(recipe: str) -> str:
    """Return the first sentence of the comment that opens a recipe: what it is for."""
    from rlinf.config.reasons import first_sentence

    lines = []
    for line in find_recipe(recipe).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return first_sentence("\n".join(lines))
