"""Stops a program with all its processes while another one is measured, and lets it go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def _tree(pid: int) -> Iterator[psutil.Process]:
    root = psutil.Process(pid)
    yield root
    yield from root.children(recursive=True)


def suspend(pid: int) -> None:
    """Stop a process and all that descend from it, until :func:`resume`.

    A run that waits for its turn is not quite idle: threads look for messages, and the daemons of
    Ray for each other.
    """
    for process in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def resume(pid: int) -> None:
    """Let them go on; what was not stopped is left alone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in _tree(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
