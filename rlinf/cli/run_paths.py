"""Which run or checkpoint the user means, and whether a run may be written where they say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlinf.config.nearest import did_you_mean
from rlinf.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.yaml"
_MANIFEST = "manifest.json"
_RUNS = Path("runs")


def find_run(given: str) -> Path:
    """Return the run directory that ``given`` names: a path, or a name below ``runs/``.

    Raises:
        ConfigError: There is no such directory, or it is no run.
    """
    for path in (Path(given).expanduser(), _RUNS / given):
        if (path / CONFIG_FILE).is_file():
            return path.resolve()
    path = Path(given).expanduser()
    if path.is_dir():
        raise ConfigError(f"{given} is no run directory: it has no {CONFIG_FILE}")
    raise ConfigError(f"no run '{given}'; {_hint(given)}")


def find_run_or_checkpoint(given: str) -> Path:
    """Return a run directory, or a checkpoint directory if ``given`` is one.

    Raises:
        ConfigError: There is neither.
        CheckpointError: The directory is below a run's checkpoints, but holds none.
    """
    path = Path(given).expanduser()
    if (path / _MANIFEST).is_file():
        return path.resolve()
    if path.is_dir() and path.resolve().parent.name == "checkpoints":
        raise CheckpointError(f"{given} holds no complete checkpoint: it has no {_MANIFEST}")
    return find_run(given)


def is_recipe(source: str, *, runs_first: bool = True) -> bool:
    """Whether the words name a recipe.

    Args:
        source: What was given.
        runs_first: A run of that name wins; otherwise it has to be given as a path.
    """
    places = (Path(source).expanduser(), Path("runs", source))
    if runs_first and any(path.is_dir() for path in places):
        return False
    from rlinf.config.load import find_recipe

    try:
        find_recipe(source)
    except ConfigError:
        return source.endswith((".yaml", ".yml"))
    return True


def _hint(given: str) -> str:
    names = list(_names_below(_RUNS))
    if not names:
        return "give the path of a run directory, such as rlinf train prints at its start"
    return did_you_mean(given, names)


def _names_below(folder: Path) -> Iterator[str]:
    for config in sorted(folder.glob(f"**/{CONFIG_FILE}")):
        yield config.parent.relative_to(folder).as_posix()


def check_new(directory: Path) -> None:
    """Refuse a directory that holds a run already.

    Raises:
        ConfigError: It does.
    """
    if (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"--run-dir = '{directory}' holds a run already; continue it with "
            f"`rlinf resume {directory}`, or give a new directory"
        )


def check_writable(directory: Path, key: str) -> None:
    """Refuse a directory that cannot be made or written, before anything starts.

    Args:
        directory: Where a run is to be written; need not exist yet.
        key: The option or key that names it, for the message.

    Raises:
        ConfigError: It cannot be written.
    """
    existing = directory.expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{key} = '{directory}': {existing} is a file, not a directory")
    _try_to_write(existing, f"{key} = '{directory}'", "give another directory with --run-dir")


def check_file_writable(path: Path, option: str, example: str = "page.html") -> None:
    """Refuse a file that cannot be made or replaced, before anything is worked out.

    Args:
        path: The file; need not exist yet, its directory must.
        option: The option that names it, for the message.
        example: Name of such a file, for the message.

    Raises:
        ConfigError: It cannot be written.
    """
    value = f"{option} = '{path}'"
    if path.is_dir():
        raise ConfigError(f"{value} is a directory; give a file, such as {path / example}")
    if not path.parent.is_dir():
        raise ConfigError(f"{value}: there is no directory {path.parent}; make it first")
    _try_to_write(path.parent, value, f"give another file with {option}")


def _try_to_write(directory: Path, value: str, instead: str) -> None:
    try:
        # Permissions alone do not tell: the file system may be read-only, or full.
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(
            f"{value}: {directory} cannot be written ({error.strerror}); {instead}"
        ) from error
