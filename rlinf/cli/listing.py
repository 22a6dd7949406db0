"""``rlinf list KIND``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated

import typer

from rlinf.cli.screen import say
from rlinf.config.load import recipe_names, recipes_directory


class Kind(StrEnum):
    """What can be listed."""

    RECIPES = "recipes"
    ENVS = "envs"
    MODELS = "models"
    ALGORITHMS = "algorithms"
    ENGINES = "engines"
    LOGGERS = "loggers"


# The function behind each kind returns names, or a table from name to class.
REGISTRIES = {
    Kind.ENVS: "rlinf.envs.registry:env_types",
    Kind.MODELS: "rlinf.models.registry:names",
    Kind.ALGORITHMS: "rlinf.algorithms.registry:names",
}


def list_names(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)],
) -> None:
    """List the recipes, environments, models, algorithms, engines or loggers that exist."""
    if kind is Kind.RECIPES:
        for name in recipe_names():
            say(f"{name:<32} {_first_comment(name)}".rstrip())
        return
    for name in sorted(_names(REGISTRIES[kind])):
        say(name)


def _names(reference: str) -> Iterable[str]:
    module, _, function = reference.partition(":")
    names: Callable[[], Iterable[str]] = getattr(importlib.import_module(module), function)
    return names()


def _first_comment(recipe: str) -> str:
    """Return the comment that opens a recipe: what it is for."""
    for suffix in (".yaml", ".yml"):
        path = recipes_directory() / f"{recipe}{suffix}"
        if path.is_file():
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            return first.removeprefix("#").strip() if first.startswith("#") else ""
    return ""
