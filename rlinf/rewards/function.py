"""A reward function of the user's own, by the name of its module or file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.rewards.protocol import RewardFunction, RewardFunctionConfig


class FunctionConfig(RewardFunctionConfig):
    """A function of your own."""

    type: Literal["function"] = "function"
    """Which reward this section configures."""
    function: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")
    """`package.module:name`, or `path/to/file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function by name."""

    def check(self) -> None:
        """Look for the module or file, without running it: that is for the processes that score."""
        where, _, name = self.function.rpartition(":")
        if where.endswith(".py"):
            if not Path(where).is_file():
                raise ConfigError(f"there is no file {where} in {Path.cwd()}", key="function")
            return
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

    def build(self) -> RewardFunction:
        """``function(sample, **options)``; ConfigError where it cannot be imported or called."""
        return partial(self._load(), **self.options)

    def _load(self) -> Callable[..., Any]:
        self.check()
        where, _, name = self.function.rpartition(":")
        try:
            module = _module_of_file(where) if where.endswith(".py") else import_module(where)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{where} cannot be imported: {reason}", key="function") from error
        function = getattr(module, name, None)
        if not callable(function):
            others = [k for k, item in vars(module).items() if callable(item) and k[0] != "_"]
            hint = did_you_mean(name, others)
            text = f"{where} has no function {name}; {hint}".rstrip("; ")
            raise ConfigError(text, key="function")
        return function  # type: ignore[no-any-return]


def _module_of_file(path: str) -> ModuleType:
    spec = spec_from_file_location(f"reward_function_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
