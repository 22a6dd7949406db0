"""Packages outside the project, as they lie where pip has installed them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlinf.envs.installation import State, status


def write_entry_points(site: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Let ``site``, which is on the path or will be, hold a package with entry points: by group,
    and by name ``module:attribute``."""
    about = site / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in named.items()), ""]
    (about / "entry_points.txt").write_text("\n".join(lines))


def require_simulator(name: str) -> None:
    """Skip a test where the environment of a simulator is not installed."""
    found = status(name)
    if found.state is not State.READY:
        pytest.skip(f"{found.state}: {found.detail}")
