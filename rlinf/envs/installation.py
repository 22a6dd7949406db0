"""Virtual environments of simulators: which are there, how one is made, and who uses it.

Each simulator that wants other packages than the trainer has an environment of its own below
:func:`home`, made by ``uv`` from exact pins. The file ``installed.json`` is written last: a
directory without it is the rest of an install that was interrupted, and is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from rlinf.config.home import user_directory
from rlinf.envs.base import REGISTRY
from rlinf.envs.renderers import LIBRARIES, loads, mujoco_renderer
from rlinf.envs.requirements import GPUS, SOURCE_VARIABLE, Requirements
from rlinf.errors import ConfigError, install_command

MANIFEST = "installed.json"
ASK_ABOVE_MB = 1024
_ROOM = (
    "nothing half made is left; RLINF_ENVS names another directory for the environments and "
    "UV_CACHE_DIR one for what is downloaded"
)


class State(StrEnum):
    """How far an env type is from being used."""

    READY = "ready"
    MISSING = "missing"
    INCOMPLETE = "incomplete"
    OUTDATED = "other version"
    DAMAGED = "damaged"
    UNFIT = "cannot run here"


@dataclass(frozen=True)
class Availability:
    """Whether an env type can be used, and why not."""

    state: State
    detail: str


def home() -> Path:
    """Return where the environments lie: ``RLINF_ENVS``, else the user's data directory.

    Raises:
        ConfigError: The user has neither, nor a home directory.
    """
    if (found := _home()) is None:
        raise ConfigError(
            "environments of simulators have no place: there is no home directory; set HOME, "
            "XDG_DATA_HOME or RLINF_ENVS"
        )
    return found


def _home() -> Path | None:
    if chosen := os.environ.get("RLINF_ENVS"):
        return Path(chosen)
    data = user_directory("XDG_DATA_HOME", ".local/share")
    return None if data is None else data / "rlinf" / "envs"


def existing(pattern: str) -> list[Path]:
    """Return what there is in the environments, or of them, whose path matches a pattern; nothing
    where they have no place."""
    place = _home()
    return [] if place is None else list(place.glob(pattern))


def _existing(name: str) -> Path | None:
    place = _home()
    return place / name if place is not None and (place / name).exists() else None


def requirements_of(name: str) -> Requirements | None:
    """Return what an env type needs; None for one that runs in any environment with gymnasium.

    Raises:
        ConfigError: The name is unknown.
    """
    return REGISTRY.load(name).requirements


def status(name: str) -> Availability:
    """Say whether the simulator of an env type can be used, without importing it."""
    needs = requirements_of(name)
    if needs is None:
        return Availability(State.READY, "runs in this environment")
    absent = [
        f"{library} (Debian: {package})"
        for library, package in needs.libraries.items()
        if not (loads(library) or (library == LIBRARIES["egl"] and loads(LIBRARIES["osmesa"])))
    ]
    if absent:
        return Availability(State.UNFIT, f"no shared library {', '.join(absent)}")
    if needs.accelerator and not any(Path(GPUS).glob("*")):
        return Availability(State.UNFIT, f"it needs an NVIDIA GPU, and {GPUS} names none")
    directory = _existing(name)
    if directory is not None:
        return _status_of(directory, name, needs)
    if importlib.util.find_spec(needs.module) is not None:
        return Availability(State.READY, "installed in this environment")
    here = f", or here: {install_command(needs.extra)}" if needs.extra else ""
    then = f"; then: {needs.assets}" if needs.assets else ""
    detail = f"no package '{needs.module}'; {install_hint(name)} ({size(needs)}){here}{then}"
    return Availability(State.MISSING, detail)


def _status_of(directory: Path, name: str, needs: Requirements) -> Availability:
    manifest = _manifest(directory)
    if manifest is None:
        why = f"an install was interrupted, or {MANIFEST} is damaged"
        return Availability(State.INCOMPLETE, f"{why}; {install_hint(name)}")
    if manifest["pins"] != _digest(name, needs):
        return Availability(State.OUTDATED, f"its pins have changed since; {install_hint(name)}")
    if gone := _gone(directory, name, needs):
        why = f"{directory} has no {' and no '.join(gone)} any more"
        return Availability(State.DAMAGED, f"{why}; {install_hint(name)}")
    return Availability(State.READY, str(directory))


def _gone(directory: Path, name: str, needs: Requirements) -> list[str]:
    """What an env process begins with and the environment has lost; nothing is run for it."""
    if not os.access(directory / "bin" / "python", os.X_OK):
        return ["bin/python that can be run"]
    pinned = {pin.partition("==")[0].replace("-", "_") for pin in _pins(name, needs)}
    modules = [each for each in ("numpy", "gymnasium", needs.module) if each in pinned]
    if needs.module not in modules and not needs.source:  # what has one may have it from there
        modules.append(needs.module)
    places = list(directory.glob("lib/python*/site-packages"))
    return [each for each in modules if not any(_holds(place, each) for place in places)]


def _holds(place: Path, module: str) -> bool:
    files = place.glob(f"{module}.*")
    return (place / module).is_dir() or any(each.suffix in (".py", ".so") for each in files)


def ready() -> list[str]:
    """Return the env types that can be used, without those whose adapter is broken."""
    usable = [name for name, found in REGISTRY.usable() if not isinstance(found, ConfigError)]
    return [name for name in usable if status(name).state is State.READY]


def interpreter(name: str) -> str | None:
    """Return the interpreter that runs an env type; None for this one.

    Raises:
        ConfigError: Its environment is missing, incomplete or of another version; in one line,
            with the command that makes it.
    """
    found = status(name)
    if found.state is not State.READY:
        raise ConfigError(f"env type `{name}`: {found.state}: {found.detail}", key="type")
    directory = _existing(name)
    return None if directory is None else str(directory / "bin" / "python")


def variables(name: str, python: str | None = None) -> dict[str, str]:
    """Return the environment variables of an env type's processes under an interpreter.

    ``MUJOCO_GL`` is the renderer that this machine has.
    """
    needs = requirements_of(name)
    found = dict(needs.variables) if needs else {}
    if "MUJOCO_GL" in found:
        found["MUJOCO_GL"] = mujoco_renderer(python)
    manifest = _manifest(_existing(name))
    if manifest and manifest["source"]:
        found[SOURCE_VARIABLE] = manifest["source"]
    return found


def check(name: str, *, source: Path | None = None) -> Requirements:
    """Return what an env type needs, after refusing what :func:`install` cannot begin with."""
    needs = requirements_of(name)
    if needs is None:
        raise ConfigError(f"env type `{name}` needs no environment of its own")
    if (found := status(name)).state is State.UNFIT:
        raise ConfigError(f"env type `{name}` {found.state}: {found.detail}", key="type")
    if source and not needs.source:
        raise ConfigError(f"env type `{name}` is a package: leave --source out")
    if not needs.source:
        return needs
    if source is None:
        raise ConfigError(f"env type `{name}` has no package: give --source, {needs.source}")
    absent = [each for each in needs.source_folders if not (source / each).is_dir()]
    if absent or not source.is_dir():
        why = f"it holds no {' and no '.join(absent)}" if source.is_dir() else "no such directory"
        raise ConfigError(f"--source = '{source}': {why}; nearest: {needs.source}")
    return needs


def is_made(name: str, *, source: Path | None = None) -> bool:
    """Whether this environment is there, with whatever further packages: another install would take
    it away from runs that use it, and lose it where nothing can be downloaded."""
    manifest = _manifest(_existing(name))
    return (
        manifest is not None
        and status(name).state is State.READY
        and manifest["source"] == (str(source.resolve()) if source else "")
    )


def packages_of(name: str) -> tuple[str, ...]:
    """Return the further packages that an environment was made with, which one that is made anew is
    to have as well."""
    manifest = _manifest(_existing(name))
    return tuple(map(str, manifest["with"])) if manifest else ()


def install(name: str, *, with_packages: Sequence[str] = (), source: Path | None = None) -> Path:
    """Make the virtual environment of an env type, or make it anew, and return its directory.

    Args:
        name: Env type.
        with_packages: Further packages for pip, such as one that brings an adapter.
        source: Folder with the simulator's source, for one that has no package.

    Raises:
        ConfigError: It needs none, cannot run here, lacks its source, or does not fit the disk; or
            the installer failed, with its last words. Nothing half made is left.
    """
    needs = check(name, source=source)
    directory = home() / name
    with _writing(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free >> 20
    if free < needs.disk_mb:
        raise ConfigError(
            f"env type `{name}` takes {needs.disk_mb} MB and {directory.parent} has {free} MB free;"
            " RLINF_ENVS names another directory"
        )
    with _alone(directory) as lock:
        shutil.rmtree(directory, ignore_errors=True)
        try:
            base = _interpreter_of(needs.python)
            _uv("venv", "--quiet", "--python", base, str(directory), lock=lock)
            python = directory / "bin" / "python"
            pins = lock_file(name)
            wanted = [*(["-r", str(pins)] if pins else []), *needs.packages, *with_packages]
            if wanted:
                arguments = ("pip", "install", "--quiet", "--python", str(python), *wanted)
                _uv(*arguments, overrides=needs.overrides, lock=lock)
            manifest = {
                "type": name,
                "pins": _digest(name, needs),
                "with": list(with_packages),
                "source": str(source.resolve()) if source else "",
            }
            with _writing(directory):
                (directory / f".{MANIFEST}").write_text(json.dumps(manifest, indent=1) + "\n")
                os.replace(directory / f".{MANIFEST}", directory / MANIFEST)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return directory


def remove(name: str) -> None:
    """Delete the virtual environment of an env type.

    Raises:
        ConfigError: There is none.
    """
    directory = home() / name
    made = sorted(path.name for path in home().glob("*") if path.is_dir())
    if name not in made:  # a path, or no word, would name something else that is there
        raise ConfigError(
            f"no environment of `{name}` in {home()}; there: {', '.join(made) or '-'}"
        )
    with _alone(directory):
        (directory / MANIFEST).unlink(missing_ok=True)  # from here on it is incomplete
        shutil.rmtree(directory)


def lock_file(name: str) -> Path | None:
    """Return the file with all pins of an env type: ``locks/NAME.txt`` beside its adapter."""
    module = sys.modules[REGISTRY.load(name).__module__]
    folder = Path(str(module.__file__)).parent
    for place in (folder, folder.parent):
        if (path := place / "locks" / f"{name}.txt").is_file():
            return path
    return None


def resolve(name: str) -> str:
    """Return the pins of an env type and of all that they bring, for its lock file.

    Raises:
        ConfigError: It needs nothing, or its pins do not get along.
    """
    needs = requirements_of(name)
    if needs is None:
        raise ConfigError(f"env type `{name}` needs no environment of its own")
    pins = _uv(
        "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-find-links",
        "--no-emit-index-url", "--python-version", needs.python, "-",
        given="\n".join(needs.packages), overrides=needs.overrides,
    )  # fmt: skip
    return pins.replace("+cpu\n", "\n")  # which build of torch is that of the machine


def size(needs: Requirements) -> str:
    """Return how much an environment downloads and takes, in words."""
    return f"downloads {needs.download_mb:,} MB, takes {needs.disk_mb:,} MB"


def install_hint(name: str) -> str:
    """Return what to type for the environment of an env type."""
    needs = requirements_of(name)
    source = " --source DIRECTORY" if needs and needs.source else ""
    return f"run `rlinf env install {name}{source}`"


def reinstall_hint(name: str) -> str:
    """Return what to type for an environment that is there, and does not work."""
    return f"run `rlinf env remove {name}`, then {install_hint(name).removeprefix('run ')}"


def _pins(name: str, needs: Requirements) -> list[str]:
    """All that an environment is to have, where that is known."""
    lock = lock_file(name)
    return [*needs.packages, *(lock.read_text().splitlines() if lock else ())]


def _digest(name: str, needs: Requirements) -> str:
    pins = lock_file(name)
    asked = [needs.python, *needs.packages, *needs.overrides]
    text = "\n".join([*asked, pins.read_text() if pins else ""])
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(directory: Path | None) -> dict[str, Any] | None:
    """What an install wrote last: the digest of its ``pins``, further packages ``with`` which it
    was made, and the ``source``; None where that is missing or of another form."""
    if directory is None:
        return None
    try:
        found = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    form = {"pins": str, "with": list, "source": str}
    whole = {"with": [], "source": "", **found} if isinstance(found, dict) else {}
    return whole if all(isinstance(whole.get(key), kind) for key, kind in form.items()) else None


def _interpreter_of(version: str) -> str:
    """What ``uv`` is told to make an environment of a version with: the interpreter that runs,
    where it is of that version, which need not be on the path."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return sys.executable if version == own else version


def _uv(
    *arguments: str, given: str = "", overrides: Sequence[str] = (), lock: int | None = None
) -> str:
    """Run the installer; the wheels that pip finds on this machine are found by it as well.

    It inherits the descriptor of a ``lock``, which so holds until the installer has ended, also
    where this process was killed before.
    """
    environment = dict(os.environ)
    if overrides:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(overrides))
            file.flush()
            return _uv(*arguments, "--overrides", file.name, given=given, lock=lock)
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    done = subprocess.run(
        [find_uv_bin(), *arguments],
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=() if lock is None else (lock,),
    )
    if done.returncode:
        words = " ".join(line.strip(" ×╰─▶│") for line in done.stderr.splitlines() if line.strip())
        hint = f"; {_ROOM}" if "os error 28" in words else ""
        raise ConfigError(f"`uv {' '.join(arguments[:2])}` failed: {words[-600:]}{hint}")
    return done.stdout


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Say in one line that there is no room, or no right, to write where the environments lie."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {place}: {error.strerror}; {_ROOM}") from error


@contextmanager
def _alone(directory: Path) -> Iterator[int]:
    """Let nobody else make or remove this environment meanwhile; gives the lock's descriptor."""
    with _writing(directory.parent):
        lock = (directory.parent / f".{directory.name}.lock").open("w")
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process installs or removes {directory.name}") from error
        yield file.fileno()
