"""Whether ``module:attribute`` is there, told without running the module: it may be a heavy one."""

from __future__ import annotations

import ast
import pkgutil
import re
import symtable
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError


def file_of(reference: str) -> Path | None:
    """The file of ``FILE.py:NAME``; None of a module's reference."""
    where, _, _ = reference.rpartition(":")
    return Path(where) if where.endswith(".py") else None


def check_reference(reference: str) -> None:
    """Refuse a reference to what is not there; the packages above its module are imported, and the
    module is read.

    Raises:
        ConfigError: With the nearest name that is there.
    """
    module, _, attribute = reference.partition(":")
    if not (module and attribute):
        raise ConfigError(f"`{reference}` is not of the form module:Class")
    names = _names_in(module)
    if names is not None and attribute not in names:
        public = [name for name in names if not name.startswith("_")]
        raise ConfigError(
            f"the module {module} has no `{attribute}`; {did_you_mean(attribute, public)}"
        )


def _names_in(module: str) -> set[str] | None:
    """What a module defines or imports; None where its source does not say so."""
    loaded = sys.modules.get(module)
    # Another thread may be importing it: then it has not all its names yet.
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        return None if hasattr(loaded, "__getattr__") else set(dir(loaded))
    try:
        spec = find_spec(module)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"the module {module} cannot be imported: {reason}") from error
    if spec is None:
        raise ConfigError(f"there is no module {module}; {_siblings(module)}".rstrip("; "))
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    own = module.startswith("rlinf.")  # a package that is missing there is told with its command
    return names_in_file(Path(spec.origin), f"the module {module}", imports=not own)


def names_in_file(
    path: Path, called: str, *, imports: bool = True, alone: bool = False
) -> set[str] | None:
    """What a Python file defines or imports, without running it; None where it does not say so.

    With ``imports`` it is looked for what it imports; where it stands ``alone`` and is no part of
    a package, also in its own folder.

    Raises:
        ConfigError: It is no Python, or begins with the import of what is not installed;
            ``called`` says in words what it is.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = symtable.symtable(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:  # of the text; of its encoding, of null bytes
        raise ConfigError(f"{called} cannot be imported: {error}") from error
    symbols = table.get_symbols()
    names = {
        each.get_name()
        for each in symbols
        if each.is_assigned() or each.is_imported() or each.is_namespace()
    }
    # Processes that run the file search the working directory, too.
    here = [str(Path.cwd()), *([str(path.absolute().parent)] if alone else [])]
    if imports and (missing := next(_missing_imports(text, here), None)):
        raise ConfigError(f"{called} cannot be imported: there is no module {missing}")
    open_ended = "__getattr__" in names or re.search(r"^\s*from .* import \*", text, re.MULTILINE)
    return None if open_ended else names


def _missing_imports(text: str, here: Sequence[str]) -> Iterator[str]:
    """Top-level modules that a file imports whenever it is run, and that are not there.

    ``here`` are the folders that are searched besides those of Python.
    """
    for line in ast.parse(text).body:
        names = [each.name for each in line.names] if isinstance(line, ast.Import) else []
        if isinstance(line, ast.ImportFrom) and not line.level and line.module:
            names = [line.module]
        for root in (name.partition(".")[0] for name in names):
            if not (root in sys.modules or find_spec(root) or PathFinder.find_spec(root, here)):
                yield root


def _siblings(module: str) -> str:
    package = module.rpartition(".")[0]
    places = getattr(sys.modules.get(package), "__path__", ())
    return did_you_mean(module, [each.name for each in pkgutil.iter_modules(places, f"{package}.")])
