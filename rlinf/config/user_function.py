"""A function of the user's own in a recipe, by the name of its module or file."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from pydantic import Field, field_validator

from rlinf.config.base import StrictModel
from rlinf.config.nearest import did_you_mean
from rlinf.config.reference import check_reference, file_of, names_in_file
from rlinf.errors import ConfigError, sought

Names = TypeVar("Names")


class UserFunctionConfig(StrictModel):
    """What sections have that name a function and its options."""

    code_files = frozenset({"function"})
    called_by_names: ClassVar[bool] = False
    """Whether it may be called with the options and others alone, and not with one thing first."""

    function: str
    """`package.module:name`, or `path/to/file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function by name."""

    @field_validator("function")
    @classmethod
    def _check_form(cls, value: str) -> str:
        where, colon, name = value.rpartition(":")
        if not (where and name.isidentifier()):
            file = where if colon else value
            raise ValueError(f"names no function; write FILE.py:NAME or MODULE:NAME: {file}:NAME")
        return value

    def check(self) -> None:
        """Look for the function in its module or file, and at how it is called, without running
        these: that is for those who call it."""
        super().check()
        where, _, name = self.function.rpartition(":")
        if (file := file_of(self.function)) is not None:
            file = file.expanduser()
            if not file.is_file():
                raise ConfigError(f"there is no file {sought(file)}", key="function")
            names = _read(lambda: names_in_file(file, where, alone=True))
            if names is not None and name not in names:
                raise _no_function(where, name, names)
        else:
            try:
                found = find_spec(where)
            except (ImportError, ValueError):
                found = None
            if found is None:
                raise ConfigError(
                    f"there is no module {where}; a file is named by its path: "
                    f"./{where.replace('.', '/')}.py:{name}",
                    key="function",
                )
            _read(lambda: check_reference(self.function))
        if (written := self.as_written()) is not None:
            self.check_call(written, by_names=self.called_by_names)

    def as_written(self) -> Callable[..., Any] | None:
        """A function without a body that is called as this one, which is not run; None where only
        running its file says how."""
        where, _, name = self.function.rpartition(":")
        file = file_of(self.function)
        if file is None:
            found = find_spec(where)
            file = Path(found.origin) if found and found.origin else None
        if file is None or file.suffix != ".py":
            return None
        return _as_written(file.expanduser(), name)

    def load(self) -> Callable[..., Any]:
        """The function; ConfigError where it cannot be imported, or called with one thing and the
        options, or by names with these and others."""
        self.check()
        where, _, name = self.function.rpartition(":")
        file = file_of(self.function)
        try:
            module = _module_of_file(file.expanduser()) if file else import_module(where)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{where} cannot be imported: {reason}", key="function") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise _no_function(
                where, name, (k for k, item in vars(module).items() if callable(item))
            )
        self.check_call(function, by_names=self.called_by_names)
        return function  # type: ignore[no-any-return]

    def check_call(self, function: Callable[..., Any], *, by_names: bool) -> None:
        """See :meth:`load`."""
        name = self.function.rpartition(":")[2]
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{name} is `async`, and is called as a plain one; let it await by asyncio.run",
                key="function",
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # one written in C may not say how it is called
        try:
            if by_names:
                signature.bind_partial(**self.options)
            else:
                signature.bind(None, **self.options)
        except TypeError as error:
            given = "".join(f", {option}=…" for option in self.options)
            raise ConfigError(
                f"{name}{signature} cannot be called as {name}(…{given}): {error}", key="function"
            ) from error


def _no_function(where: str, name: str, names: Iterable[str]) -> ConfigError:
    hint = did_you_mean(name, [each for each in names if each[0] != "_"])
    return ConfigError(f"{where} has no function {name}; {hint}".rstrip("; "), key="function")


def _as_written(file: Path, name: str) -> Callable[..., Any] | None:
    """A function without a body that is called as the one in a file, which is not run; None where
    something else than its definition may say how."""
    tree = ast.parse(file.read_bytes())
    named = [each for each in ast.walk(tree) if _binds(each, name)]
    (found,) = named if len(named) == 1 else (None,)
    if found not in tree.body or not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if found.decorator_list:
        return None
    found.body, found.returns, arguments = [ast.Pass()], None, found.args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [_plain(each) for each in arguments.defaults]
    arguments.kw_defaults = [each and _plain(each) for each in arguments.kw_defaults]
    scope: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module([found], []))
    exec(compile(module, str(file), "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return getattr(node, "name", None) == name or getattr(node, "asname", None) == name


def _plain(default: ast.expr) -> ast.expr:
    return default if isinstance(default, ast.Constant) else ast.Constant(...)


def _read(look: Callable[[], Names]) -> Names:
    """What is found; of what is not, the key says where it was written."""
    try:
        return look()
    except ConfigError as error:
        error.key = "function"
        raise


_loaded = itertools.count()
"""Of files: each load is a module of its own, so that no two workers share what it holds."""


def _module_of_file(path: Path) -> ModuleType:
    path = path.absolute()
    name = f"user_function_{path.stem}_{next(_loaded)}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    if str(path.parent) not in sys.path:  # of its neighbours; behind all that is installed
        sys.path.append(str(path.parent))
    module = module_from_spec(spec)
    sys.modules[name] = module  # where data classes and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
