"""The example package, installed as pip would: its folder on the path, its entry points in a
dist-info."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).with_name("example_package")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the package and its entry points, as its pyproject.toml states them, on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for path in (info.parent, PACKAGE):
        monkeypatch.syspath_prepend(str(path))
    importlib.invalidate_caches()
    yield info.parent
    for module in [module for module in sys.modules if module.startswith("rlinf_example")]:
        del sys.modules[module]
