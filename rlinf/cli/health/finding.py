"""One line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """What was looked at and how it is.

    Args:
        name: What was looked at.
        status: ``ok``; ``absent`` (optional and not installed); ``warning`` (works, but worse than
            it could); ``failed`` (a run will fail).
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
