"""Recipes: found by name or path, stacked on their base, changed by ``key=value``.

The origin of every value is kept, so that an error names the file and line that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from rlinf.config.nearest import did_you_mean, nearest_names
from rlinf.config.yaml_source import read_value, read_yaml
from rlinf.errors import ConfigError

COMMAND_LINE = "command line"
_SUFFIXES = (".yaml", ".yml")
_MISSING = "???"  # OmegaConf's mark of a value that a later layer has to give
_REPLACED = ("cluster.component_placement",)
"""Sections that are one value: where each component runs means nothing beside another placement."""


@dataclass(frozen=True)
class Source:
    """Where a value was written: a file and its line, or the command line."""

    where: str
    line: int | None = None

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where} line {self.line}"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe after its bases and overrides, not yet validated."""

    name: str  # or the path that it was read from
    data: dict[str, Any]  # plain dicts, lists and scalars
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Where each dotted key was written last."""

    @property
    def short_name(self) -> str:
        """Last part of the name, without suffix: how a run of the recipe is called."""
        return Path(self.name).stem

    def source_of(self, key: str) -> Source:
        """Return where ``key``, or else the section that holds it, was written."""
        while key:
            if key in self.sources:
                return self.sources[key]
            key = key.rpartition(".")[0]
        return Source(self.name)


def recipes_directory() -> Path:
    """Return the folder of the ready recipes: inside the installed package, or the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the ready recipes, such as ``embodied/metaworld_ppo``."""
    root = recipes_directory()
    return sorted(
        path.relative_to(root).with_suffix("").as_posix()
        for path in root.rglob("*")
        if path.suffix in _SUFFIXES
    )


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """Return the file of a recipe given by name (``quickstart``) or by path (``my.yaml``).

    A file wins. A relative path starts ``beside`` a folder, or else in the working directory.
    """
    path = Path(beside or "", Path(name_or_path).expanduser())
    if path.suffix in _SUFFIXES and path.is_file():
        return path
    name = name_or_path.removeprefix("recipes/")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    for suffix in _SUFFIXES:
        ready = recipes_directory() / f"{name}{suffix}"
        if ready.is_file():
            return ready
    if path.is_file() and path.suffix == ".json":  # which is YAML, too
        return path
    if path.is_file():
        raise ConfigError(f"recipe file '{name_or_path}' must end in .yaml")
    if path.is_dir():
        raise ConfigError(f"'{name_or_path}' is a directory; a recipe is a file that ends in .yaml")
    kind = "file or recipe" if Path(name_or_path).suffix in _SUFFIXES else "recipe"
    raise ConfigError(f"no {kind} '{name_or_path}'; {_nearest_file(path) or nearest_recipes(name)}")


def _nearest_file(path: Path) -> str:
    """Return a hint: a recipe file of the same folder that is called like ``path``, if any."""
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    files = {each.stem: each for each in sorted(there) if each.suffix in _SUFFIXES}
    stem = path.stem if path.suffix in _SUFFIXES else path.name
    alike = nearest_names(stem, files, count=1)
    return f"did you mean the file `{files[alike[0]]}`?" if alike else ""


def nearest_recipes(name: str) -> str:
    """Return a hint: the recipes whose last part is called like ``name``, or how to list them."""
    known, last = recipe_names(), Path(name).name
    close = [each for each in known if last and Path(each).name == last]
    close = close or nearest_names(name, known)
    if not close:
        return "`rlinf list recipes` shows which there are"
    return f"did you mean {' or '.join(f'`{each}`' for each in close)}?"


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe, its ``base:`` chain and the overrides of the command line.

    A mapping is merged into the base's mapping key by key, a list, a value or a placement of
    components replaces the base's. Overrides are ``a.b=value`` with the value typed as YAML,
    ``a.0.b=value`` where ``a`` is a list; ``~a.b``, and ``without: [a.b]`` in a file, drop what the
    layers before said.

    Raises:
        ConfigError: A file or override is not legal, bases form a circle, or ``${…}`` dangles.
    """
    path = find_recipe(name_or_path)
    layers = _Layers()
    _read_file(path, layers, trail=())
    for override in overrides:
        layers.override(override)
    return LoadedRecipe(_display(path), layers.resolved(), layers.sources)


def with_overrides(name: str, data: Mapping[str, Any], overrides: Sequence[str]) -> LoadedRecipe:
    """Return a section or whole config as a recipe, after the overrides of the command line."""
    layers = _Layers()
    layers.add(data, name, {})
    for override in overrides:
        layers.override(override)
    return LoadedRecipe(name, layers.resolved(), layers.sources)


class _Layers:
    """The merged layers so far, and the origin of each of their keys."""

    def __init__(self) -> None:
        self.config = OmegaConf.create({})
        self.sources: dict[str, Source] = {}

    def add(
        self, data: Mapping[str, Any], where: str, lines: Mapping[str, int], written: str = ""
    ) -> None:
        """Merge a layer, of which ``written`` is the section that was given, or all."""
        for key in _REPLACED:
            if f"{key}.".startswith(f"{written}." if written else ""):
                self._make_room(key, data)
        for key, value in _flatten(data):
            old = OmegaConf.select(self.config, key)
            if not isinstance(value, Mapping):
                if OmegaConf.is_config(old):
                    self._forget_below(key)
            elif key in self.sources and OmegaConf.is_dict(old):
                continue  # a section belongs to the layer that opened it
            self.sources[key] = Source(where, lines.get(key))
            if OmegaConf.is_config(old) and OmegaConf.is_list(old) != isinstance(value, list):
                OmegaConf.update(self.config, key, None)  # a list and a section do not merge
        try:
            # Not by a copy of all layers so far, which nobody else has.
            self.config = OmegaConf.unsafe_merge(self.config, OmegaConf.create(dict(data)))  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{where}: {_first_line(error)}") from error
        for key, value in _flatten(data):
            if value == _MISSING:  # merged, it leaves what was said before
                OmegaConf.update(self.config, key, value, force_add=True)

    def _make_room(self, key: str, data: Mapping[str, Any]) -> None:
        """Drop a section that a layer gives anew."""
        given: Any = data
        for part in key.split("."):
            given = given.get(part) if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and OmegaConf.is_dict(OmegaConf.select(self.config, key)):
            self.remove(key, COMMAND_LINE)

    def override(self, text: str) -> None:
        if text.startswith("~"):
            self.remove(text[1:], COMMAND_LINE)
            return
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(
                f"{COMMAND_LINE}: '{text}' is not of the form key=value, for example seed=3"
            )
        self._refuse_key_inside_value(key)
        data: Any = read_value(value, f"{COMMAND_LINE}: {key}")
        if any(OmegaConf.is_list(OmegaConf.select(self.config, part)) for part in _above(key)):
            self._set_in_list(key, data)
            return
        for part in reversed(key.split(".")):
            data = {part: data}
        self.add(data, COMMAND_LINE, {}, written=key)

    def _set_in_list(self, key: str, data: Any) -> None:
        """Set what an entry of a list holds; a mapping cannot be merged into the list."""
        old = OmegaConf.select(self.config, key)
        if OmegaConf.is_config(old) and OmegaConf.is_list(old) != isinstance(data, list):
            OmegaConf.update(self.config, key, None)  # see add
        try:
            OmegaConf.update(self.config, key, data, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{COMMAND_LINE}: {_first_line(error)}") from error
        for below, _ in _flatten({key: data}):
            self.sources[below] = Source(COMMAND_LINE)

    def remove(self, key: str, where: str) -> None:
        parent_key, _, name = key.rpartition(".")
        parent = OmegaConf.select(self.config, parent_key) if parent_key else self.config
        if OmegaConf.is_list(parent) and name in map(str, range(len(parent))):
            raise ConfigError(
                f"{where}: `{key}` is an entry of a list and cannot be dropped alone; give the "
                f"others as a whole: {parent_key}=…"
            )
        if not OmegaConf.is_dict(parent) or name not in parent:
            hint = did_you_mean(key, self.sources, list_up_to=0)
            raise ConfigError(f"{where}: nothing sets `{key}`, so it cannot be dropped. {hint}")
        del parent[name]
        self.sources.pop(key, None)
        self._forget_below(key)

    def _forget_below(self, key: str) -> None:
        for old in [old for old in self.sources if old.startswith(f"{key}.")]:
            del self.sources[old]

    def resolved(self) -> dict[str, Any]:
        try:
            data = OmegaConf.to_container(self.config, resolve=True)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None)
            where = f"{self.sources.get(key, '')} `{key}`".strip() if key else "recipe"
            known = ""
            if isinstance(error, UnsupportedInterpolationType):
                known = (
                    "; known: ${a.b} of another key, ${oc.env:NAME}, ${oc.decode:${oc.env:NAME}}"
                )
            raise ConfigError(f"{where}: {_first_line(error)}{known}") from error
        for key, value in _flatten(data):  # type: ignore[arg-type]
            if value == _MISSING:
                told = f"`{key}`: `???` stands for a value that is missing; give one"
                raise ConfigError(f"{self.sources[key]}: {told}" if key in self.sources else told)
        return data  # type: ignore[return-value]

    def _refuse_key_inside_value(self, key: str) -> None:
        for section in _above(key):
            source = self.sources.get(section)
            value = OmegaConf.select(self.config, section) if source else None
            if value is None or OmegaConf.is_dict(value):
                continue
            entry = key.removeprefix(f"{section}.").partition(".")[0]
            sections = OmegaConf.is_list(value) and all(map(OmegaConf.is_dict, value))
            if sections and entry in map(str, range(len(value))):
                continue
            what, hint = f"the value {value!r} ({source}), not a section", ""
            if sections:
                what = f"a list of {len(value)} sections ({source})"
                hint = f", or say of which: {section}.0.… to {section}.{len(value) - 1}.…"
            raise ConfigError(
                f"{COMMAND_LINE}: `{key}` cannot be set, because `{section}` is {what}; give it as "
                f"a whole: {section}=…{hint}"
            )


def _read_file(path: Path, layers: _Layers, trail: tuple[Path, ...]) -> None:
    path = path.resolve()
    if path in trail:
        circle = " -> ".join(_display(step) for step in (*trail[trail.index(path) :], path))
        raise ConfigError(f"the bases of {_display(trail[0])} form a circle: {circle}")
    where = _display(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    data, lines = read_yaml(text, where)
    _refuse_hydra(data, lines, where)
    base, without = data.pop("base", None), data.pop("without", [])
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{where} line {lines['base']}: `base` must be one recipe or file")
        try:
            found = find_recipe(base, beside=path.parent)
        except ConfigError as error:
            raise ConfigError(f"{where} line {lines['base']}: base: {error}") from error
        _read_file(found, layers, (*trail, path))
    if not isinstance(without, list) or not all(isinstance(key, str) for key in without):
        raise ConfigError(f"{where} line {lines['without']}: `without` must be a list of keys")
    for key in without:
        layers.remove(key, f"{where} line {lines['without']}")
    layers.add(data, where, lines)


def _refuse_hydra(data: Mapping[str, Any], lines: Mapping[str, int], where: str) -> None:
    """Refuse a file that is a part of a config of Hydra: the rest of its keys stands elsewhere."""
    for key, kind in {"defaults": list, "hydra": Mapping}.items():
        if isinstance(data.get(key), kind):
            raise ConfigError(
                f"{where} line {lines[key]}: `{key}` is of Hydra, for which the file is made; "
                "compose it first (python SCRIPT --config-name NAME --cfg job --resolve), here "
                "files build on each other by `base:`"
            )


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every section and every value with its dotted key, sections first; the sections of a
    list have their place in it as name."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        yield key, value
        inside = value
        if isinstance(value, list):
            inside = {str(n): each for n, each in enumerate(value) if isinstance(each, Mapping)}
        if isinstance(inside, Mapping):
            yield from _flatten(inside, f"{key}.")


def _above(key: str) -> Iterator[str]:
    """Yield the sections that a dotted key lies in, outermost first."""
    return accumulate(key.split(".")[:-1], "{}.{}".format)


def _display(path: Path) -> str:
    resolved, roots = path.resolve(), {recipes_directory(): "recipes/"}
    with suppress(FileNotFoundError):  # the working directory was deleted
        roots = {Path.cwd(): "", **roots}
    for root, prefix in roots.items():
        if resolved.is_relative_to(root):
            return f"{prefix}{resolved.relative_to(root).as_posix()}"
    return str(path)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
