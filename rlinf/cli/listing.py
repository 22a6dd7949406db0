"""``rlinf list KIND``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from rlinf.cli.screen import show_table
from rlinf.config.explain import first_sentence
from rlinf.config.load import find_recipe, recipe_names


class Kind(StrEnum):
    """What can be listed."""

    RECIPES = "recipes"
    ENVS = "envs"
    MODELS = "models"
    ALGORITHMS = "algorithms"
    ENGINES = "engines"
    LOGGERS = "loggers"


# The registry of each kind: the function that gives its names, and the one that gives the class
# behind a name, whose docstring says what it is.
REGISTRIES = {
    Kind.ENVS: ("rlinf.envs.registry", "env_types", "env_class"),
    Kind.MODELS: ("rlinf.models.registry", "names", "config_class"),
    Kind.ALGORITHMS: ("rlinf.algorithms.registry", "names", "config_class"),
    Kind.LOGGERS: ("rlinf.monitor.loggers.registry", "logger_names", "logger_class"),
}

ENGINES = {"torch": "The policy's own forward pass, in the rollout worker."}


def list_names(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)],
) -> None:
    """List the recipes, environments, models, algorithms, engines or loggers that exist."""
    show_table("", ("", ""), _rows(kind))


def _rows(kind: Kind) -> Iterator[tuple[str, str]]:
    if kind is Kind.RECIPES:
        yield from ((name, _opening_comment(name)) for name in recipe_names())
    elif kind is Kind.ENGINES:
        yield from ENGINES.items()
    else:
        module_name, names, class_of = REGISTRIES[kind]
        module: Any = importlib.import_module(module_name)
        for name in sorted(getattr(module, names)()):
            yield name, first_sentence(getattr(module, class_of)(name).__doc__ or "")


def _opening_comment(recipe: str) -> str:
    """Return the first sentence of the comment that opens a recipe: what it is for."""
    lines = []
    for line in find_recipe(recipe).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return first_sentence("\n".join(lines))
