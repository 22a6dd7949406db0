"""Where exchangeable components are found: a literal table, and entry points of other packages.

Env processes use this too, under other interpreters: it imports the standard library alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import getattr_static, isfunction, signature
from typing import Any, Generic, TypeVar

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError

T = TypeVar("T")


def load_attribute(reference: str) -> Any:
    """Import and return ``module:attribute``."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def require_call(where: str, own: Any, base: Any) -> None:
    """Refuse a method that cannot be called like another; its class methods are as they stand."""
    expected = signature(base).parameters
    by_name = [key for key, each in expected.items() if each.kind is each.KEYWORD_ONLY]
    by_place = [key for key in expected if key not in by_name]
    try:
        signature(getattr(own, "__func__", own)).bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        name = where.rpartition(".")[2]
        called = ", ".join([*by_place[1:], *(f"{key}=…" for key in by_name)])
        raise ConfigError(f"{where} cannot be called as {name}({called}): {error}") from error


def load_component(reference: str, base: Any, made: Callable[..., Any]) -> Any:
    """Import ``module:Class``, which makes a ``base`` of a section, called as ``made`` is.

    Raises:
        ConfigError: It is no subclass of it, leaves out methods of it, or has some that cannot be
            called like those.
    """
    found = load_attribute(reference)
    name = f"{base.__module__}.{base.__qualname__}"
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{reference} is no subclass of {name}", key="type")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{reference} leaves out {', '.join(missing)}, which every {name} has", key="type"
        )
    try:
        require_call(f"{reference}.__init__", found.__init__, made)  # type: ignore[misc]
        for method, own in vars(base).items():
            mine = getattr_static(found, method)
            if isfunction(own) and isfunction(mine) and not method.startswith("_"):
                require_call(f"{reference}.{method}", mine, own)
    except ConfigError as error:
        raise ConfigError(error.reason, key="type") from error
    return found


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> Iterable[EntryPoint]:
    """Entry points of a group of what is installed on the ``path``, which is sys.path; to read them
    opens a file of every package. Before Python 3.10 they come by group, and cannot be asked."""
    try:
        return entry_points(group=group)
    except TypeError:
        by_group: Any = entry_points()
        found: Iterable[EntryPoint] = by_group.get(group, ())
        return found


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The components of one kind; a class is imported when it is asked for by name."""

    kind: str  # what the components are, in messages: `model`
    group: str  # of the entry points by which packages outside add components
    table: Mapping[str, str]  # the project's own as `module:Class`; their names cannot be taken
    base: type[T]  # of which every component is a subclass
    lacking: Callable[[type[T]], str] | None = None  # what else a class must have and has not

    def names(self) -> list[str]:
        """Return the known names, sorted; nothing is imported."""
        return sorted({*self.table, *(point.name for point in self._points())})

    def load(self, name: str) -> type[T]:
        """Import the class behind a name; ConfigError if it is unknown or cannot be used."""
        if name in self.table:
            return self._class(name, self.table[name], "of this project")
        for point in (each for each in self._points() if each.name == name):
            package = getattr(getattr(point, "dist", None), "name", "an unknown package")
            return self._class(name, point.value, f"(entry point {self.group} of {package})")
        raise ConfigError(f"unknown {self.kind} `{name}`; {did_you_mean(name, self.names())}")

    def _points(self) -> Iterable[EntryPoint]:
        return _entry_points(self.group, tuple(sys.path))

    def usable(self) -> Iterator[tuple[str, type[T] | ConfigError]]:
        """Yield every name with its class, or with why it cannot be used, in one line."""
        for name in self.names():
            try:
                yield name, self.load(name)
            except ConfigError as error:
                yield name, error

    def _class(self, name: str, reference: str, origin: str) -> type[T]:
        where = f"{self.kind} `{name}` is broken: {reference} {origin}"
        try:
            found = load_attribute(reference)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{where} cannot be imported: {reason}") from error
        if not (isinstance(found, type) and issubclass(found, self.base)):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{where} is no subclass of {base}")
        missing = self.lacking(found) if self.lacking is not None else ""
        if missing:
            raise ConfigError(f"{where} has no {missing}")
        return found
