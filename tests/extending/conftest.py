"""The example package, installed as pip would: its folder on the path, its entry points in a
dist-info."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packages import write_entry_points

PACKAGE = Path(__file__).with_name("example_package")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the package and its entry points, as its pyproject.toml states them, on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    write_entry_points(site, project["name"], project["entry-points"])
    for path in (site, PACKAGE):
        monkeypatch.syspath_prepend(str(path))
    importlib.invalidate_caches()
    yield site
    for module in [module for module in sys.modules if module.startswith("rlinf_example")]:
        del sys.modules[module]
