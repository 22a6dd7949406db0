"""A recipe with other values: as it is tried, measured, or placed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlinf.config.dump import to_data
from rlinf.config.load import with_overrides
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig

_SILENT = ("logger.backends=[]", "runner.timeline=false", "runner.plan=manual")
_UNSAVED = ("checkpoint.interval=0",)


def changed(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with other values; a placement that is given replaces the whole placement.

    Raises:
        ConfigError: They are not legal.
    """
    data = to_data(config)
    for key in ("component_placement", "residency"):
        if any(text.startswith(f"cluster.{key}=") for text in overrides):
            data["cluster"].pop(key, None)
    recipe = with_overrides("a trial", data, overrides)
    return validate(type(config), recipe.data, recipe)


def quiet(config: PlacedConfig, overrides: Sequence[str]) -> PlacedConfig:
    """A config with overrides that writes and decides nothing beside.

    Raises:
        ConfigError: They are not legal.
    """
    return changed(config, [*_SILENT, *overrides])


def legal_trials(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The recipe as it is, then its trials; those that its rules refuse are left out."""
    known = [quiet(config, _UNSAVED)]
    yield "the recipe as it is", known[0]
    for trial in config.planning.trials:
        try:
            found = quiet(config, (*_UNSAVED, *trial.overrides))
        except ConfigError:
            continue
        if not any(_same_setting(found, other) for other in known):
            known.append(found)
            yield trial.label, found


def _same_setting(one: PlacedConfig, other: PlacedConfig) -> bool:
    return _same_work(one, other) and one.plan.same_places(other.plan)


def _same_work(one: PlacedConfig, other: PlacedConfig) -> bool:
    """Whether steps have equally many items, and may run equally far ahead."""
    first, second = one.planning, other.planning
    same = first.items == second.items
    return same and first.constraints.staleness == second.constraints.staleness


def legal_placements(config: PlacedConfig) -> Iterator[tuple[str, PlacedConfig]]:
    """The trials with all items of the recipe, without its own placement, as the run goes on."""
    known = [config]
    for trial in config.planning.trials:
        try:
            found = changed(config, trial.overrides)
        except ConfigError:
            continue
        if _same_work(found, config) and not any(_same_setting(found, o) for o in known):
            known.append(found)
            yield trial.label, found
