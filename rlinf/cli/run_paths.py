"""Which run or checkpoint the user means, and whether a run may be written where they say."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf.config.nearest import nearest_names
from rlinf.errors import CheckpointError, ConfigError
from rlinf.monitor.run_directory import require_empty

CONFIG_FILE = "config.yaml"
LATEST = "latest"
_MANIFEST = "manifest.json"
_RUNS = Path("runs")
_BEGINNING = 4096
"""Bytes of a file in which it is seen what it is."""


def find_run(given: str, recipes: Iterable[str] = ()) -> Path:
    """Return the run directory that ``given`` names: a path, or a name below ``runs/``.

    The error of one that is not there names the nearest run, or of ``recipes``, which might have
    been meant instead.
    """
    places = (Path(given).expanduser(), _RUNS / given)
    for path in places:
        if (path / CONFIG_FILE).is_file():
            return path.resolve()
    for path in places:
        if path.exists():
            raise ConfigError(
                f"{given} is no run directory: it has no {CONFIG_FILE}{_run_around(path)}"
            )
    raise ConfigError(f"no run '{given}'; {_hint(given, recipes)}")


def _run_around(path: Path) -> str:
    """Name the run that a path lies in, or the newest one in a directory of runs, or say that it
    holds a published model."""
    for near in (*path.parents, path / LATEST):
        if (near / CONFIG_FILE).is_file():
            return f"; nearest: {near}"
    if (path / "config.json").is_file():
        return "; it holds a model, from which a run begins that has it as model.path"
    return ""


def find_run_or_checkpoint(given: str, recipes: Iterable[str] = ()) -> Path:
    """Return a run directory, or a checkpoint directory if ``given`` is one, in the same places."""
    for path in (Path(given).expanduser(), _RUNS / given):
        if (path / _MANIFEST).is_file():
            run = path.resolve().parent.parent
            if not (run / CONFIG_FILE).is_file():
                raise CheckpointError(
                    f"{given} is a checkpoint outside of its run, whose {CONFIG_FILE} says what it "
                    f"is of: {run} has none; give it where the run wrote it, or copy the run"
                )
            return path.resolve()
        if path.parent.name == "checkpoints" and path.parent.is_dir():
            if path.is_dir():
                raise CheckpointError(
                    f"{given} holds no complete checkpoint: it has no {_MANIFEST}"
                )
            there = sorted(each.parent.name for each in path.parent.glob(f"*/{_MANIFEST}"))
            raise CheckpointError(f"there is no {given}, but {', '.join(there) or 'none'}")
    return find_run(given, recipes)


def run_given(source: str, overrides: Sequence[str] | None, recipes: Iterable[str] = ()) -> Path:
    """The same, with whose configuration the command line changes nothing."""
    path = find_run_or_checkpoint(source, recipes)
    if overrides:
        raise ConfigError(f"{overrides[0]} has no effect on a run: its configuration is fixed")
    return path


def is_recipe(source: str, *, runs_first: bool = True) -> bool:
    """Whether the words name a recipe; with ``runs_first`` a run or checkpoint of that name wins.

    A directory that is neither does not: the runs of a recipe lie in one of its name.
    """
    places = (Path(source).expanduser(), _RUNS / source)
    if runs_first and any(_is_of_a_run(path) for path in places):
        return False
    from rlinf.config.load import find_recipe

    try:
        find_recipe(source)
    except ConfigError:
        return source.endswith((".yaml", ".yml"))
    return True


def _is_of_a_run(path: Path) -> bool:
    inside = path.is_dir() and path.parent.name == "checkpoints"
    return inside or any((path / name).is_file() for name in (CONFIG_FILE, _MANIFEST))


def _hint(given: str, recipes: Iterable[str]) -> str:
    configs = sorted(_RUNS.rglob(CONFIG_FILE), key=lambda file: file.stat().st_mtime)
    runs = [config.parent.relative_to(_RUNS).as_posix() for config in configs]
    links = [link for link in _RUNS.rglob(LATEST) if (link / CONFIG_FILE).is_file()]
    names = [*runs, *(link.relative_to(_RUNS).as_posix() for link in links)]
    wanted = given.removeprefix(f"{_RUNS}/")
    close = nearest_names(wanted, [*names, *recipes], count=1)
    if close:
        kind = "" if close[0] in names else "the recipe "
        return f"did you mean {kind}`{close[0]}`?"
    if runs:
        return f"newest: {', '.join(runs[:-4:-1])}"
    return "give the path of a run directory, such as rlinf train prints at its start"


def check_new(directory: Path) -> None:
    """Refuse a directory that holds a run already, or anything else."""
    if (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"--run-dir = '{directory}' holds a run already; continue it with "
            f"`rlinf resume {shlex.quote(str(directory))}`, or give a new directory"
        )
    require_empty(directory)


def check_writable(directory: Path, key: str) -> None:
    """Refuse a directory that cannot be made or written, before anything starts."""
    try:
        existing = directory.expanduser().absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"{key} = '{directory}': the working directory was deleted; change into another one"
        ) from None
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{key} = '{directory}': {existing} is a file, not a directory")
    option = key if key.startswith("--") else "--run-dir"
    instead = f"give another directory with {option}"
    if (directory / CONFIG_FILE).is_file():
        instead = "make it writable, or go on with a copy of it"
    _try_to_write(existing, f"{key} = '{directory}'", instead)


def check_file_writable(
    path: Path, option: str, example: str = "page.html", mark: bytes = b""
) -> None:
    """Refuse a file that cannot be made or replaced, before anything is worked out.

    One that is there is replaced where its beginning holds ``mark``, in lower case: it was written
    so before. Any other may be what the user cannot do without.
    """
    value = f"{option} = '{path}'"
    if mark and path.is_file():
        with path.open("rb") as file:
            begin = file.read(_BEGINNING).lower()
        if begin and mark not in begin:
            raise ConfigError(
                f"{value} exists and is something else; give a new file, such as "
                f"{path.with_name(example)}, or remove it"
            )
    if path.is_dir():
        raise ConfigError(f"{value} is a directory; give a file, such as {path / example}")
    if path.exists() and not path.is_file():  # a file would take its place
        raise ConfigError(f"{value} is a device, pipe or socket; give a file, such as {example}")
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
