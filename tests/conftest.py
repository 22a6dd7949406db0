"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from matplotlib.figure import Figure

# As `make test` has it, and read when torch is imported: tests run beside each other, and results
# that are compared by their bits need the same number of threads everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is judged by the clock: a machine may be busy.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
_save = Figure.savefig
# What is imported for the tests stays: to look for garbage among it takes seconds.
gc.disable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a collection of garbage need not look at it."""
    gc.freeze()
    gc.enable()


def _leave_empty(figure: Figure, path: Path, **_: Any) -> None:
    path.touch()


@pytest.fixture(autouse=True, scope="session")
def _no_pictures() -> None:
    """Runs leave an empty learning curve: to draw one takes as long as to train a few steps."""
    Figure.savefig = _leave_empty


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Children are not told which test they are of: those with the same variables share a start."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As for fixtures."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@contextmanager
def drawing() -> Iterator[None]:
    """Pictures are drawn."""
    Figure.savefig = _save
    try:
        yield
    finally:
        Figure.savefig = _leave_empty
