"""How a run that fails is reported: the whole trace in its log, the last lines on the screen."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.screen import complain

_LAST_LINES = 6


@dataclass
class Reporting:
    """What the process knows about where to report a failure.

    Args:
        debug: Show the whole trace on the screen.
        log: The run's log file, once there is one.
    """

    debug: bool = False
    log: Path | None = None


reporting = Reporting()


def _switch_on(value: bool) -> bool:
    reporting.debug = reporting.debug or value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the whole trace of a failure.", callback=_switch_on)
]


def report_failure(error: BaseException) -> None:
    """Write the trace of ``error`` to the log and the end of it to the screen."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if reporting.log is not None:
        with reporting.log.open("a", encoding="utf-8") as log:
            log.write("\n".join(["", *lines, ""]))
    if reporting.debug or len(lines) <= _LAST_LINES:
        complain("\n".join(["the run failed", *lines]), label="failure")
        return
    where = f"whole trace in {reporting.log}" if reporting.log else "whole trace with --debug"
    shown = "\n".join(["the run failed; the trace ends in", *lines[-_LAST_LINES:], where])
    complain(shown, label="failure")
