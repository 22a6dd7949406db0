"""Workers that are processes of their own import what the driver's program imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rlinf

ROOT = Path(rlinf.__file__).parents[1]

PROGRAM = """
    import importlib, json, os, sys
    sys.path.insert(0, "{inserted}")
    sys.path.append("{late}")
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    NAMES = ("rlinf", "first", "second", "third", "fourth", "pyclbr")

    class Importer(Worker):
        def files(self):
            return [importlib.import_module(name).__file__ for name in NAMES]

    if __name__ == "__main__":
        cluster = Cluster(num_nodes=1)
        group = Importer.create_group().launch(cluster, NodePlacementStrategy([0]), "importer")
        driver = [importlib.import_module(name).__file__ for name in NAMES]
        print(json.dumps([driver, *group.files().wait()]))
"""


def imported(directory: Path, **variables: str) -> tuple[list[str], list[str]]:
    """Files of modules that a driver and its worker import; each is in several folders."""
    modules = ("first", "second", "third", "fourth")
    names = ("inserted", "program", "one", "two", "working", "late")
    places = {name: directory / name for name in names}
    for number, place in enumerate(places.values()):
        place.mkdir()
        # The n-th module is not in folders before the n-th; the last two follow the library's.
        for module in (*modules[: number + 1], *(("pyclbr",) if number >= len(modules) else ())):
            (place / f"{module}.py").touch()
    program = places["program"] / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(**places))
    paths = os.pathsep.join(map(str, (places["one"], places["two"], ROOT)))
    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=places["working"],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    driver, worker = json.loads(ended.stdout.splitlines()[-1])
    return driver, worker


def test_a_worker_imports_what_the_driver_does(tmp_path: Path) -> None:
    driver, worker = imported(tmp_path)
    folders = [Path(file).parent.name for file in driver]
    assert folders[1:5] == ["inserted", "program", "one", "two"]
    assert worker == driver


@pytest.mark.slow
def test_code_that_is_sent_is_what_workers_import(tmp_path: Path) -> None:
    driver, worker = imported(tmp_path, RLINF_CODE_WORKING_DIR="auto")
    assert Path(driver[0]).is_relative_to(ROOT)
    assert "_ray_pkg_" in worker[0]
    assert worker[1:] == driver[1:]
