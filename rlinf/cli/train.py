"""``rlinf train RECIPE [key=value …]`` and ``rlinf resume RUN [key=value …]``."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf.cli.failure import Debug, as_it_was_if_refused, nothing_left_if_refused, reporting
from rlinf.cli.lasting_output import lasting
from rlinf.cli.run_paths import CONFIG_FILE, check_new, check_writable, find_run
from rlinf.cli.screen import say, show_table
from rlinf.errors import ConfigError
from rlinf.processes.interrupt import raise_noted

if TYPE_CHECKING:
    from rlinf.cli.tasks import AnyTask
    from rlinf.flow.placed_config import PlacedConfig
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.runners.run import Run

INTERRUPTED = 130
_ONE_WISH_SECONDS = 1.0
"""Within which a second SIGTERM is the first one again: `timeout` sends it to the program and then
to its group, which the program is of."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace the recipe's: seed=3 …"),
]

Moved = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Where what the run began with lies by now: model.path=PATH …"
    ),
]


def train(
    recipe: Annotated[str, typer.Argument(help="Name (`rlinf list recipes`) or file.")],
    overrides: Overrides = None,
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print config, batches and placement."),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="The same as seed=N.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of this run; it must not hold a run yet.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train by a recipe."""
    from rlinf.cli.tasks import read_config, require_training
    from rlinf.config.named_files import at_absolute_paths
    from rlinf.config.validate import check
    from rlinf.monitor.run_directory import showing_warnings
    from rlinf.runners.task import require_workers

    changes = [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]
    task, loaded, config = read_config(recipe, changes)
    require_training(task, recipe)
    if run_dir is None:
        check_writable(config.runner.output_dir, "runner.output_dir")
    else:
        check_new(run_dir)
        check_writable(run_dir, "--run-dir")
    with showing_warnings():
        check(config, loaded)
    if not task.__module__.startswith("rlinf."):
        require_workers(task, config)  # own ones are tested, and their flows may import torch
    config = at_absolute_paths(config)
    if dry_run:
        print_dry_run(config)
        return

    raise_noted()
    from rlinf.config.dump import to_yaml
    from rlinf.flow.plan import PLAN_FILE
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.monitor.run_origin import Origin

    name, origin = loaded.short_name, Origin.of(config)
    with (
        RunDirectory.create(config.runner.output_dir, name, path=run_dir) as directory,
        nothing_left_if_refused(directory),
    ):
        origin.save(directory.path)
        directory.write_config(to_yaml(config))
        config.plan.save(directory.path / PLAN_FILE)
        execute(task, config, directory, resume=False)


def resume(
    run: Annotated[str, typer.Argument(help="A run directory, or a name below runs/.")],
    overrides: Overrides = None,
    *,
    changed_code: Annotated[
        bool,
        typer.Option(
            "--changed-code",
            help="Go on with files of Python, such as a reward function, that have changed.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its newest good checkpoint."""
    from rlinf.cli.tasks import of_other_types, read_config, require_training
    from rlinf.config.named_files import at_absolute_paths
    from rlinf.config.validate import check
    from rlinf.monitor.run_directory import showing_warnings
    from rlinf.runners.evaluation import origin_of

    path = find_run(run)
    check_writable(path, "run directory")
    file = path / CONFIG_FILE
    _refuse_other_place(overrides or [], path)
    task, recipe, config = read_config(str(file), of_other_types(file, overrides or []))
    require_training(task, run)
    config, origin = at_absolute_paths(config), origin_of(task, path)
    with showing_warnings():
        origin.refuse_other_config(config, task.changeable, why="a resumed run")
        origin.refuse_other_files(config, changed_code=changed_code)
        check(config, recipe)

    from rlinf.config.dump import to_data, to_yaml
    from rlinf.flow.plan import PLAN_FILE
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.monitor.run_origin import ORIGIN_FILE, Origin

    with (
        RunDirectory.open(path) as directory,
        as_it_was_if_refused(directory, CONFIG_FILE, ORIGIN_FILE, PLAN_FILE),
    ):
        files = Origin.of(config).files if changed_code else origin.files
        replace(origin, config=to_data(config), files=files).save(path)
        directory.write_config(to_yaml(config))
        config.plan.save(directory.path / PLAN_FILE)
        execute(task, config, directory, resume=True)


def _refuse_other_place(overrides: Sequence[str], run: Path) -> None:
    for given in overrides:
        if given.lstrip("~").partition("=")[0].strip() == "runner.output_dir":
            raise ConfigError(
                f"command line: {given}: a run that goes on stays in its directory, {run}; to go "
                "on elsewhere, copy the directory and resume the copy"
            )


def execute(task: AnyTask, config: PlacedConfig, directory: RunDirectory, *, resume: bool) -> None:
    """Run a task with log, interruption and the exit code that belongs to its end."""
    from rlinf.monitor.run_directory import logging_to

    reporting.log = directory.log
    run: Run | None = None
    asked = stop_on_interrupt(at_once=lambda: run is not None and run.starting)
    with logging_to(directory.log), lasting("stdout"), asked as stop:
        try:
            print_batches(config)
            say(f"\nrun directory: {directory.path}")
            from rlinf.runners.run import Run

            run = Run(task, config, directory, stop)
            run.run(resume=resume)
        except KeyboardInterrupt:  # while it started
            stop.set()
        if stop.is_set():
            say(f"\ninterrupted; continue with: rlinf resume {shlex.quote(str(directory.path))}")
            raise typer.Exit(INTERRUPTED)


def print_dry_run(config: PlacedConfig) -> None:
    """Print everything that is decided before a run starts."""
    from rlinf.config.dump import config_hash, to_yaml

    say(to_yaml(config))
    print_batches(config)
    say()
    columns, *rows = config.placement_table()
    show_table("placement", columns, rows)
    say(f"\nconfig {config_hash(config)[:12]}: nothing was started")


def print_batches(config: PlacedConfig) -> None:
    """Print how environments or prompts become batches."""
    rows = config.batch_table()
    if rows:
        show_table("batches", ("", ""), rows)


@contextlib.contextmanager
def stop_on_interrupt(
    what: str = "a run that starts ends; else the step, evaluation or warm start under way ends, "
    "then a checkpoint is committed",
    *,
    at_once: Callable[[], bool] = lambda: False,
) -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C (or SIGTERM) sets; a second one ends the process.

    The user is told ``what`` is done meanwhile. The runner looks at the flag between two steps,
    commits a checkpoint and returns. Where ``at_once`` says that nothing is to be waited for, a
    KeyboardInterrupt is raised as well. The second signal kills the child processes, removes their
    shared memory and exits with 130 without waiting for anything. A terminal that hangs up sets the
    flag too, unless the command was started to outlive it (``nohup``); it may do so several times,
    and ends nothing at once.
    """
    stop, asked = threading.Event(), 0.0
    told = f"\nStopping: {what}. A further Ctrl-C or SIGTERM ends the command at once.\n"

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if stop.is_set():
            again = number == signal.SIGTERM and time.monotonic() - asked < _ONE_WISH_SECONDS
            if number == signal.SIGHUP or _asked_by_ray() or again:
                return
            _leave_nothing_behind()
            os._exit(INTERRUPTED)
        asked = time.monotonic()
        stop.set()
        with contextlib.suppress(OSError):  # nobody may be there to read it
            # A handler may interrupt a buffered write, so it writes past the buffers.
            os.write(
                sys.__stderr__.fileno() if sys.__stderr__ else 2,
                told.encode(),
            )
        if at_once():
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in end_signals()}
    try:
        raise_noted()
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _asked_by_ray() -> bool:
    """Whether a signal is no second wish of the user, but Ray's, whose control process is gone."""
    started = sys.modules.get("rlinf.scheduler.runtime.ray_start")
    if started is None or not started.control_lost.is_set():
        return False
    started.control_lost.clear()
    return True


def end_signals() -> list[signal.Signals]:
    """Those that ask a command to end; not a terminal's end where `nohup` started it."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if outlives else [signal.SIGHUP])]


def _leave_nothing_behind() -> None:
    import psutil

    from rlinf.scheduler.transport.cluster_files import remove_own_files

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    remove_own_files()
