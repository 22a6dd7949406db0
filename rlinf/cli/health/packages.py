"""What a look at the machine finds; at first versions of Python and packages, by metadata alone."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement

from rlinf.errors import install_command

Status = Literal["ok", "absent", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """What was looked at and how it is.

    Args:
        name: What was looked at.
        status: ``absent`` is optional; with a ``warning`` it works, but worse than it could; with
            ``failed`` a run will fail.
        detail: Version, size, or the cause of the failure.
        fix: The command that puts it right, empty if nothing is wrong.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def gigabytes(size: float) -> str:
    """Return a number of bytes as ``3.2 GB``."""
    return f"{size / 1e9:.1f} GB"


_OLDEST_PYTHON = (3, 11)

_NOT_FOR_USERS = {"dev"}
"""Extras that a run never needs."""


def package_findings() -> Iterator[Finding]:
    """Yield the versions of Python and of every package that the project declares."""
    good = sys.version_info >= _OLDEST_PYTHON
    yield Finding(
        "python",
        "ok" if good else "failed",
        f"{platform.python_version()} ({sys.executable})",
        "" if good else "uv venv --python 3.11",
    )
    try:
        declared = importlib.metadata.requires("rlinf") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("rlinf", "failed", "runs from its source tree", "pip install -e .")
        return
    for requirement in map(Requirement, declared):
        extra = _extra(requirement)
        if extra not in _NOT_FOR_USERS:
            yield _finding(requirement, extra)


def _extra(requirement: Requirement) -> str:
    """The extra that brings a package; empty for those of the base install."""
    marker = str(requirement.marker or "")
    return marker.partition("extra ==")[2].strip().strip("\"'")


def _finding(requirement: Requirement, extra: str) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    fix = install_command(extra) if extra else f"pip install '{name}{wanted}'"
    version = _version(name)
    if not version:
        if extra:
            return Finding(name, "absent", f"optional: {extra}", fix)
        return Finding(name, "failed", "not installed", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "warning" if extra else "failed", f"{version} is not {wanted}", fix)
    return Finding(name, "ok", version)


def installed(name: str) -> bool:
    """Whether a distribution is installed."""
    return bool(_version(name))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
