"""The directory of a run: where everything it writes lies, and whose it is.

runs/<recipe>/<time>/        config.yaml     the resolved configuration
                             origin.json     the same as it began, and digests of the files it read
                             metrics.jsonl   numbers of every step
                             run.log         what the run said
                             timeline.json   trace, if asked for
                             end.json        with which step and configuration it came to its end
                             checkpoints/  evaluations/
                             videos/  completions/  tensorboard/  once one is written
runs/<recipe>/latest -> the newest one
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlinf.checkpoint.files import is_disk_full, point_link, write_atomic
from rlinf.config.named_files import LATEST
from rlinf.errors import CheckpointError, UserError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
END_FILE = "end.json"
_LOCK_FILE = ".lock"
_DIRECTORIES = ("checkpoints", "evaluations", "videos", "completions", "tensorboard")
_OPENED = (_LOCK_FILE, "run.log", METRICS_FILE, "plan.yaml")
"""What a run opens to write as it is, where others are replaced."""
_FILES = (*_OPENED, "timeline.json", END_FILE,
          "env_spec.json", "origin.json", "profile.json")  # fmt: skip
_WRITTEN_WHOLE = (CONFIG_FILE, END_FILE, "origin.json", "policy.safetensors", "initial_model")
"""What a run writes under a hidden name first, ``.NAME.…``, and nobody else."""
_OF_COMPLETIONS = re.compile(r"(\d+)\.jsonl")
_OF_EVALUATION = re.compile(r".+_step_(\d{8,})(?:_[a-z]+)?\.(?:json|mp4)")
"""Names of files by step; one with ``_served_…`` is of a policy elsewhere, with its own steps."""
_logger = logging.getLogger(__name__)
_FORMAT = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"


class RunDirectory:
    """A run's directory, locked by this process until it is closed or the process dies.

    Built by :meth:`create` or :meth:`open`; a context manager that gives up the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.config = path / CONFIG_FILE
        self.metrics = path / METRICS_FILE
        self.log = path / "run.log"
        self.timeline = path / "timeline.json"
        self.traces = path / "trace"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations"
        self.videos = path / "videos"
        self.completions = path / "completions"
        self._end = path / END_FILE
        self._lock: int | None = _lock(path)
        self.begun = True
        """Whether there is something to go on with; of a new run not before it says so."""
        self._made: list[Path] = []  # of directories, the inner ones first
        self._latest_before: str | None = None

    @classmethod
    def create(
        cls, output_dir: Path | str, recipe: str, *, path: Path | str | None = None
    ) -> RunDirectory:
        """Make the directory of a new run: ``path``, or ``output_dir/recipe/<present time>``.

        Raises:
            UserError: It cannot be written, or holds something.
        """
        if path is not None:
            return cls._at(Path(path))
        parent = Path(output_dir).expanduser().absolute() / recipe
        made = _make(parent)
        run = cls._at(_unused(parent))
        run._made = [run.path, *made]
        run._latest_before = _target(parent / LATEST)
        point_link(parent / LATEST, run.path.name)
        return run

    @classmethod
    def _at(cls, path: Path) -> RunDirectory:
        path = path.expanduser().absolute()
        made = _make(path)
        require_empty(path)  # before there is a lock in it
        run = cls(path)
        try:
            require_empty(path)
        except UserError:
            run.close()
            raise
        _remove_unfinished(path)
        for directory in (run.checkpoints, run.evaluations):
            directory.mkdir(exist_ok=True)
        run.begun, run._made = False, made
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open the directory of a run that goes on.

        Raises:
            UserError: It is no run, cannot be written, or another process is writing it.
        """
        path = Path(path).expanduser().resolve()
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"{path} is no run directory: it has no {CONFIG_FILE}")
        _check_writable(path)
        _check_kinds(path)
        _check_parts(path)
        run = cls(path)
        _remove_unfinished(path)
        for directory in (run.checkpoints, run.evaluations):
            directory.mkdir(exist_ok=True)
        return run

    def require(self) -> None:
        """Raise a CheckpointError where the directory was moved or removed since it was opened.

        What a run writes may have made another one in its place, which has no lock file; a copy
        that was put there has another one.
        """
        try:
            there = self._lock is None or os.path.samestat(
                os.fstat(self._lock), os.stat(self.path / _LOCK_FILE)
            )
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            raise CheckpointError(
                f"{self.path} is no longer there: a run that is moved or removed while it goes on "
                "ends; what it had committed went with it"
            )

    def write_config(self, text: str) -> None:
        """Write the resolved configuration; from here on the run can be resumed."""
        write_atomic(self.config, text.encode())

    def note_end(self, what: Mapping[str, Any]) -> None:
        """Write down what the run came to its end with, once all is there that it leaves behind."""
        write_atomic(self._end, json.dumps(what).encode())

    @property
    def end(self) -> Any:
        """See :meth:`note_end`; None where the run has not come to an end, and ``{}`` where what it
        said of that is damaged."""
        if not self._end.is_file():
            return None
        try:
            return json.loads(self._end.read_bytes())
        except ValueError:
            return {}

    def discard_after(self, step: int) -> None:
        """Remove what is told of later steps, which a run that goes on from this one has not had:
        completions, and evaluations with their videos."""
        for directory, names in (
            (self.completions, _OF_COMPLETIONS),
            (self.evaluations, _OF_EVALUATION),
            (self.videos, _OF_EVALUATION),
        ):
            for path in directory.iterdir() if directory.is_dir() else ():
                named = names.fullmatch(path.name)
                if named and int(named[1]) > step and path.is_file():
                    path.unlink()

    def discard(self) -> None:
        """Leave nothing behind of a run that never began.

        ``latest`` points where it did before, and a directory that the user had made stays.
        """
        if self.begun:
            raise ValueError(f"the run {self.path} has begun: what it wrote is kept")
        link = self.path.parent / LATEST
        if _target(link) == self.path.name:  # else another run has begun meanwhile
            if self._latest_before is None:
                link.unlink()
            else:
                point_link(link, self._latest_before)
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        self.close()
        with suppress(OSError):  # one that holds something by now, as another run
            for directory in self._made:
                directory.rmdir()

    def close(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            _held.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _unused(parent: Path) -> Path:
    """A directory named by the present time, made so that no other run gets it."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        path = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise UserError(f"{parent} holds a thousand runs of this second")


def _target(link: Path) -> str | None:
    """Where a link points to; None where there is none."""
    return os.readlink(link) if link.is_symlink() else None


def _make(path: Path) -> list[Path]:
    """Make a directory; returns it and those above that were not there, the inner ones first."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The run directory {path} has a name that is no UTF-8, which its files could not "
            "hold. Give another one with --run-dir or runner.output_dir"
        ) from error
    try:
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    _check_writable(path)
    return made


def _check_kinds(path: Path) -> None:
    """Refuse a file where a directory belongs, the reverse, and links that lead nowhere."""
    for name in _DIRECTORIES + _FILES:
        place = path / name
        if place.is_symlink() and not place.exists():
            raise UserError(f"{place} is a link that leads nowhere: remove it")
        if not place.exists():
            continue
        if name in _DIRECTORIES and not place.is_dir():
            raise UserError(f"{place} is a file, where a run has a directory: move it away")
        if name in _FILES and place.is_dir():
            raise UserError(f"{place} is a directory, where a run has a file: move it away")


def _check_writable(path: Path) -> None:
    # Asking for permissions is not enough: the file system may be full or mounted for reading.
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
    except OSError as error:
        raise _unwritable(path, error) from error


def _check_parts(path: Path) -> None:
    """Refuse a run with a part that cannot be written, as after another user went on with it: what
    was computed until the first save would be lost."""
    for name in _DIRECTORIES:
        if (path / name).is_dir():
            _check_writable(path / name)
    for name in _OPENED:
        try:
            # Not to be made here: a run is to have its lock before it writes anything.
            with suppress(FileNotFoundError):
                os.close(os.open(path / name, os.O_WRONLY | os.O_APPEND))
        except OSError as error:
            raise _unwritable(path / name, error) from error


def _elsewhere(path: Path) -> str:
    """What helps where the directory of a run, or a part of it, takes no more."""
    if (path / CONFIG_FILE).exists() or (path.parent / CONFIG_FILE).exists():
        return "Make room, or let it be written, or go on with a copy of the run elsewhere"
    return "Give another one with --run-dir or runner.output_dir"


def _unwritable(path: Path, error: OSError) -> UserError:
    what = "" if (path.parent / CONFIG_FILE).exists() else "The run directory "
    return UserError(f"{what}{path} cannot be written ({error.strerror}). " + _elsewhere(path))


def _remove_unfinished(path: Path) -> None:
    """Remove what a killed process had begun to write; to be called by who holds the lock."""
    for left in [left for name in _WRITTEN_WHOLE for left in path.glob(f".{name}.*")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()


def require_empty(path: Path) -> None:
    """Refuse the directory of a new run, by a UserError, that holds something; what a run left that
    was killed before it had a configuration is nothing."""
    entries = path.expanduser().iterdir() if path.expanduser().is_dir() else ()
    present = [entry for entry in entries if entry.name != _LOCK_FILE]
    found = sorted(entry.name for entry in present)
    if CONFIG_FILE in found or not all(map(_is_of_a_beginning, present)):
        resume = f", or go on with this run: rlinf resume {shlex.quote(str(path))}"
        go_on = resume if CONFIG_FILE in found else "."
        raise UserError(
            f"The run directory {path} is not empty (it holds {', '.join(found[:3])}"
            f"{', …' if len(found) > 3 else ''}). Give another one with --run-dir{go_on}"
        )


def _is_of_a_beginning(entry: Path) -> bool:
    """Whether a run makes it before its configuration."""
    if entry.is_dir():
        return entry.name in {"checkpoints", "evaluations"} and not any(entry.iterdir())
    written = entry.name.startswith((f".{CONFIG_FILE}.", ".origin.json."))
    return written or entry.name == "origin.json"


def _lock(path: Path) -> int:
    """The descriptor that holds the lock; the kernel frees it when the process dies."""
    try:
        descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path / _LOCK_FILE, error) from error
    try:
        _take(descriptor)
    except OSError as error:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace") or "unknown"
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserError(
                f"The run {path} is being written by another process ({holder}). "
                "Wait for it or end it first"
            ) from error
        raise _unwritable(path, error) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    _held.add(descriptor)
    return descriptor


def _take(descriptor: int) -> None:
    """Lock, with a second of patience: what a killed process had forked closes its copy at once."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


_held: set[int] = set()


def _let_go() -> None:
    """A child that was forked must not hold the lock of a run whose process is dead."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def showing_warnings() -> Iterator[None]:
    """Show the project's warnings as a run shows them."""
    logger, handler = logging.getLogger("rlinf"), _ScreenHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append the project's log lines, and Python's warnings, to a file; show warnings.

    What ends a thread of a library is a warning too, with its trace in the file.
    """
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_FORMAT))
    file.setLevel(logging.INFO)
    handlers = (file, _ScreenHandler(logging.WARNING))
    loggers = [logging.getLogger("rlinf"), logging.getLogger("py.warnings")]
    levels = [logger.level for logger in loggers]
    logging.captureWarnings(True)
    of_threads, threading.excepthook = threading.excepthook, _tell_of_thread
    for logger in loggers:
        logger.setLevel(logging.INFO)
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        threading.excepthook = of_threads
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()


def _tell_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:
        return
    name = "a thread" if ended.thread is None else f"thread '{ended.thread.name}'"
    trace = traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)
    _logger.info("Trace of %s:\n%s", name, "".join(trace))
    _logger.warning("%s ended: %s", name, trace[-1].strip())


class _LogFile(logging.FileHandler):
    """Lines that a full disk does not take are lost in silence: the screen shows what warns."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - name of logging
        """Say what went wrong, but for a full disk."""
        if not is_disk_full(sys.exc_info()[1]):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; on a full disk what was not written yet is lost."""
        try:
            super().close()
        except OSError as error:
            if not is_disk_full(error):
                raise


class _ScreenHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is at that moment.

    While a live display is shown that is a stand-in, which puts the line above the display. Rich's
    own log handler looks behind the stand-in and would write into the display.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line."""
        try:
            label = f"{record.levelname.lower()}:"
            if sys.stderr.isatty():
                label = f"\x1b[1;33m{label}\x1b[0m"
            sys.stderr.write(f"{label} {self.format(record)}\n")
        except OSError:
            self.handleError(record)
