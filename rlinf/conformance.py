"""The frame of every conformance suite: named checks, each of which says what it saw.

An adapter's protocol comes with a suite that a user can run: ``rlinf check env|engine NAME``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rlinf.errors import RLinfError, RunFailure, told

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check: what was seen or, on failure, expected."""

    name: str
    passed: bool
    detail: str


class NotMetError(Exception):
    """A subject does not do what the check asks for."""


def require(condition: object, message: str) -> None:
    """Fail the present check with this message unless the condition holds."""
    if not condition:
        raise NotMetError(message)


def outcome(
    name: str,
    check: Callable[[SubjectT], str],
    subject: SubjectT,
    failures: tuple[type[Exception], ...] = (),
) -> CheckResult:
    """Run one check, which returns what it saw, or raises what was expected instead.

    An exception of the subject ends the suite, unless it is a failure of the run or in
    ``failures``: then it fails the check.
    """
    expected: tuple[type[Exception], ...] = (NotMetError, RunFailure, *failures)
    try:
        return CheckResult(name, True, check(subject))
    except expected as error:
        own = isinstance(error, NotMetError | RLinfError)
        return CheckResult(name, False, str(error) if own else told(error))
