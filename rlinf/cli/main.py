"""The command line: one file per verb, small verbs too, and what their ends mean to the shell.

Exit codes: 0 done, 1 the run failed, 2 the user can correct it, 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer

import rlinf
from rlinf.cli import (
    check,
    convert,
    data,
    env,
    evaluate,
    explain,
    listing,
    plan,
    record,
    serve,
    train,
    view,
)
from rlinf.cli.failure import Debug, report, reporting
from rlinf.cli.health import doctor
from rlinf.cli.lasting_output import lasting
from rlinf.cli.screen import say
from rlinf.cli.train import INTERRUPTED
from rlinf.config.home import home_directory

app = typer.Typer(
    name="rlinf",
    help="Reinforcement-learning post-training for models that act.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("eval")(evaluate.evaluate)
app.command("record")(record.record)
app.add_typer(serve.app, name="serve")
app.command("list")(listing.list_names)
app.command("explain")(explain.explain)
app.add_typer(check.app, name="check")
app.add_typer(convert.app, name="convert")
app.add_typer(data.app, name="data")
app.add_typer(env.app, name="env")
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("view")(view.view)


def _version(value: bool) -> None:
    if value:
        say(f"rlinf {rlinf.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    """Reinforcement-learning post-training for models that act."""
    if os.environ.get("RLINF_EXT_MODULE"):
        from rlinf.scheduler.runtime.launch import register_extensions

        register_extensions(again=False)  # what it adds may stand in the recipe


@functools.cache
def _command() -> Callable[..., Any]:
    """The tree of commands; it is made once however many of them a program runs."""
    return typer.main.get_command(app)


def _at_home(argument: str) -> str:
    """An option whose path begins at home: shells expand `~` at the start of a word alone."""
    option, equals, value = argument.partition("=")
    home = home_directory()
    if home is not None and option.startswith("--") and equals and value.startswith("~/"):
        return f"{option}={home}{value[1:]}"
    return argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process, and return the exit code of the process."""
    reporting.debug, reporting.log, reporting.resumes = False, None, True
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a terminal that lacks a character
    with lasting("stderr"):
        try:
            given = sys.argv[1:] if arguments is None else arguments
            _command()(args=[_at_home(each) for each in given])
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the boundary of the program: report, then end
            return report(error)
        return 0
