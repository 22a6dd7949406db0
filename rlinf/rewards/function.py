"""A reward function of the user's own, by the name of its module or file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
from rlinf.rewards.protocol import RewardFunction, RewardInput

if TYPE_CHECKING:
    from rlinf.rewards.config import FunctionConfig


def find_module(reference: str) -> None:
    """Look for the module or file of ``module:name`` or ``file.py:name``, without running it.

    Raises:
        ConfigError: There is none.
    """
    where, _, _ = reference.rpartition(":")
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
            f"./{where.replace('.', '/')}.py:{reference.rpartition(':')[2]}",
            key="function",
        )


def load_function(reference: str) -> Callable[..., Any]:
    """Import and return what ``module:name`` or ``file.py:name`` names.

    Raises:
        ConfigError: It cannot be imported, or is nothing that can be called.
    """
    find_module(reference)
    where, _, name = reference.rpartition(":")
    try:
        module = _module_of_file(where) if where.endswith(".py") else import_module(where)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where} cannot be imported: {reason}", key="function") from error
    function = getattr(module, name, None)
    if not callable(function):
        callables = [key for key, item in vars(module).items() if callable(item)]
        hint = did_you_mean(name, [key for key in callables if not key.startswith("_")])
        raise ConfigError(f"{where} has no function {name}; {hint}".rstrip("; "), key="function")
    return function  # type: ignore[no-any-return]


def _module_of_file(path: str) -> ModuleType:
    spec = spec_from_file_location(f"reward_function_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class UserReward(RewardFunction):
    """Calls ``function(sample, **options)``.

    Raises:
        ConfigError: There is no such function.
    """

    def __init__(self, config: FunctionConfig) -> None:
        self._function = load_function(config.function)
        self._options = dict(config.options)

    def __call__(self, sample: RewardInput) -> float:
        """Return what the function returns."""
        value: float = self._function(sample, **self._options)
        return value
