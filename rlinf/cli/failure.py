"""How errors are reported: messages on the screen, the whole trace in the log of the run.

What the project raises on purpose is told by its message; of any other exception the screen shows
the line of the user's own code that it comes from, or else the end of the trace. An exception that
a worker raised is reported as if it were raised here.
"""

from __future__ import annotations

import errno
import resource
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf.checkpoint.files import write_atomic
from rlinf.cli.screen import complain, say
from rlinf.config.home import home_directory
from rlinf.errors import RLinfError, UserError, own_line, shortened
from rlinf.scheduler.errors import WorkerCallError

if TYPE_CHECKING:
    from rlinf.monitor.run_directory import RunDirectory

FAILED, USER_ERROR = 1, 2

_TRACE_LINES = 6
_MESSAGE_LINES = 20
_FIRST_LINES = 4
_LINE_CHARACTERS = 800
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Of a disk that is read-only by now, or damaged."""
_NO_USER = "a path begins with ~NAME, and there is no user NAME; nearest: ~/NAME, or ./~NAME"
_NO_HOME = (
    "there is no home directory, which paths with ~ begin with: set HOME (RLINF_ENVS, "
    "XDG_DATA_HOME and XDG_CACHE_HOME name what would lie there)"
)
_LESS = (
    "Smaller batches or models, fewer environments or answers at once, and a smaller "
    "replay.capacity need less; of a recipe to train `rlinf plan RECIPE --memory` looks for what "
    "fits."
)


@dataclass
class Reporting:
    """Whether the screen shows the whole trace; and the run's log file, once there is one, with
    whether `rlinf resume` takes that run."""

    debug: bool = False
    log: Path | None = None
    resumes: bool = True


reporting = Reporting()


def _switch_on(value: bool) -> bool:
    reporting.debug = reporting.debug or value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the whole trace of a failure.", callback=_switch_on)
]


@contextmanager
def nothing_left_if_refused(directory: RunDirectory) -> Iterator[None]:
    """Remove the directory of a run that is refused before it began; a failure keeps its log."""
    try:
        yield
    except Exception as error:
        if isinstance(_origin(error)[0], UserError) and not directory.begun:
            reporting.log = None
            directory.discard()
            say(f"the run did not begin, and left nothing behind in {directory.path}")
        raise


@contextmanager
def as_it_was_if_refused(directory: RunDirectory, *names: str) -> Iterator[None]:
    """Put files of a run back that is refused before it goes on: what it was refused for would be
    there the next time."""
    files = [directory.path / name for name in names]
    before = {file: file.read_bytes() if file.is_file() else None for file in files}
    begun, directory.begun = directory.begun, False
    try:
        yield
    except Exception as error:
        if isinstance(_origin(error)[0], UserError) and not directory.begun:
            for file, content in before.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    write_atomic(file, content)
        raise
    finally:
        directory.begun = begun or directory.begun


def report(error: Exception) -> int:
    """Report an error and return the exit code of the process."""
    origin, place = _origin(error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    logged = _log(trace)
    too_long = isinstance(origin, OSError) and origin.errno == errno.ENAMETOOLONG
    if too_long and reporting.log is None and not reporting.debug:
        complain(f"{shortened(str(origin), 200)}; nearest: a path that can be one")
        return USER_ERROR
    if isinstance(origin, RuntimeError) and "home directory" in str(origin):
        complain(_NO_HOME if home_directory() is None else _NO_USER)
        return USER_ERROR
    full = _full_disk(origin)
    if full is not None and not reporting.debug:
        complain(full, label="failure")
        return FAILED
    if isinstance(origin, UserError):
        complain(str(origin))
        return USER_ERROR
    where = f"whole trace in {reporting.log}" if logged else "whole trace with --debug"
    told = None if reporting.debug else _process_limit(origin, place, trace.splitlines())
    told = told and f"{told}\n{where}"
    complain(told or _failure(origin, place, trace.splitlines(), where), label="failure")
    if reporting.log is not None and any(reporting.log.parent.glob("checkpoints/step_*")):
        run = shlex.quote(str(reporting.log.parent))
        say(f"what was committed before is unharmed; go on with: rlinf resume {run}")
    return FAILED


def _log(trace: str) -> bool:
    """Whether the log of the run has taken a trace; on a full disk there is no room for it."""
    if reporting.log is None:
        return False
    try:
        with reporting.log.open("a", encoding="utf-8") as log:
            log.write(f"\n{trace}\n")
    except OSError:
        return False
    return True


def _origin(error: BaseException) -> tuple[BaseException, str]:
    """Return the exception that a worker raised, and the worker; else the error itself."""
    place = ""
    while isinstance(error, WorkerCallError) and error.__cause__ is not None:
        place = f" in {error.worker_name}"
        error = error.__cause__
    return error, place


def _full_disk(error: BaseException) -> str | None:
    """What to do where an error says that the disk is full; None: it does not."""
    from rlinf.checkpoint.files import is_disk_full

    if isinstance(error, OSError) and is_disk_full(error):
        what = f": {error.filename}" if error.filename else ""
        told = f"{error.strerror}{what}"
    elif is_disk_full(error) or (isinstance(error, RLinfError) and is_disk_full(error.__cause__)):
        told = str(error)
    else:
        return None
    log = reporting.log
    if log is None or not reporting.resumes:
        return f"{told}; free some space, and give the command again"
    run = shlex.quote(str(log.parent))
    return (
        f"{told}\nWhat was committed before is unharmed. "
        f"Free some space, and go on with: rlinf resume {run}"
    )


def _failure(origin: BaseException, place: str, trace: list[str], where: str) -> str:
    from rlinf.monitor.memory import tells_of_full_memory

    if reporting.debug:
        return "\n".join([f"the run failed{place}", *trace])
    message = str(origin).splitlines()
    if isinstance(origin, RLinfError) and not isinstance(origin, WorkerCallError) and message:
        if len(message) > _MESSAGE_LINES:  # the last lines of a trace say what it was
            message[_FIRST_LINES : _FIRST_LINES - _MESSAGE_LINES] = ["…"]
        head = f"the run failed{place}: {message[0]}"
        return "\n".join([*map(_line, [head, *message[1:]]), where])
    own = own_line(trace)
    if own:
        what = " ".join(f"{type(origin).__name__}: {origin}".split())
        return f"the run failed{place}: {_line(what)}{own}\n{where}"
    if isinstance(origin, OSError) and origin.filename and origin.errno in _UNWRITABLE:
        return f"the run failed{place}: {origin.strerror}: {origin.filename}\n{where}"
    if tells_of_full_memory(what := f"{type(origin).__name__}: {origin}".rstrip(": ")):
        return "\n".join([f"memory is full{place}: {_line(' '.join(what.split()))}", _LESS, where])
    head = f"the run failed{place}; the trace ends in"
    return "\n".join([head, *map(_line, trace[-_TRACE_LINES:]), where])


def _process_limit(error: BaseException, place: str, trace: list[str]) -> str | None:
    """What to do where the end of a trace, perhaps that of a process that was lost, says that
    nothing more could be started; None: it does not."""
    text = "\n".join([str(error), *trace[-_TRACE_LINES:]])
    if "can't start new thread" not in text and not ("BlockingIOError" in text and "fork" in text):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = "no limit" if most == resource.RLIM_INFINITY else str(most)
    return (
        f"no further thread or process can be started{place}: the user may have so many "
        f"(`ulimit -u`: {user}), or the container (its limit of pids). Raise the limit, end other "
        "programs, or start fewer (env.train.processes, reward.processes)."
    )


def _line(text: str) -> str:
    return shortened(text, _LINE_CHARACTERS)
