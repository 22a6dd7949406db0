"""Ctrl-C while a command begins: a library that is being imported may swallow the exception."""

from __future__ import annotations

import signal
from types import FrameType

_noted = False


def note_interrupts() -> None:
    """Remember a Ctrl-C from now on, beside that it raises a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def raise_noted() -> None:
    """Raise the KeyboardInterrupt of a Ctrl-C that nothing has ended by; before work begins."""
    if _noted:
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _noted  # noqa: PLW0603 - a signal is one of the process
    _noted = True
    signal.default_int_handler(number, frame)
