"""The env side under older interpreters: what its files may use, and runs under those there are."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from uv import find_uv_bin

import rlinf
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.supervised.vector import SupervisedVectorEnv

OLDEST = "3.8"
PACKAGE = Path(rlinf.__file__).parent
ROOTS = ("rlinf.envs.supervised.process", "rlinf.envs.supervised.option_check")


def _file(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
    return found[0] if found else None


def env_side() -> list[Path]:
    """Every file that an env process may import, those imported inside functions included."""
    todo = [*ROOTS, "rlinf.envs.gymnasium_env"]  # other adapters run where their simulator does
    seen: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        file = _file(module)
        if file is None or module in seen:
            continue
        seen[module] = file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                todo += [each.name for each in node.names]
        todo = [each for each in todo if each.split(".")[0] == "rlinf"]
    return sorted(seen.values())


def test_the_env_side_uses_nothing_that_python_3_8_lacks() -> None:
    files = env_side()
    assert PACKAGE / "envs" / "supervised" / "host.py" in files
    vermin = str(Path(sys.executable).with_name("vermin"))
    command = [vermin, "--no-tips", f"-t={OLDEST}-", "--violations"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for file in files:  # unions that are computed, which vermin does not tell from annotations
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                assert not isinstance(node.args[1], ast.BinOp), f"{file}:{node.lineno}"


def test_the_env_side_imports_nothing_that_an_old_interpreter_would_have_to_have() -> None:
    allowed = {"numpy", "gymnasium", "rlinf", *sys.stdlib_module_names}
    for file in env_side():
        for node in ast.parse(file.read_text()).body:
            names = (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert {name.split(".")[0] for name in names} <= allowed, file


def _interpreter(minor: int) -> str | None:
    """What uv finds on the path or beside pyenv, whose own names may lead nowhere; or has itself.

    ``RLINF_TEST_PYTHONS`` names folders in which to look first.
    """
    folders = [os.environ.get("RLINF_TEST_PYTHONS", "")]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True)
        folders += map(str, Path(root.stdout.strip()).glob(f"versions/3.{minor}.*/bin"))
    path = os.pathsep.join([*filter(None, folders), os.environ["PATH"]])
    done = subprocess.run(
        [find_uv_bin(), "python", "find", "--no-project", "--offline", f"3.{minor}"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None


def _config(python: str | None) -> EnvConfig:
    return EnvConfig(
        type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=10, processes=1,
        python=python, start_deadline=600.0, step_deadline=300.0,
    )  # fmt: skip


def _episodes(python: str | None) -> list[np.ndarray]:
    with SupervisedVectorEnv(_config(python), num_envs=2, seed=3) as env:
        seen = [env.reset()["states"]]
        for _ in range(6):
            step = env.chunk_step(np.full((2, 3, 1), 0.5, np.float32))
            assert step.valid.all()
            seen.append(step.observations["states"])
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("minor", [each for each in range(8, 15) if each != sys.version_info[1]])
def test_envs_run_under_every_other_interpreter_that_is_there(minor: int, tmp_path: Path) -> None:
    """They keep the protocol, a killed process included, and give this interpreter's episodes."""
    found = _interpreter(minor)
    if found is None:
        pytest.skip(f"no Python 3.{minor}; RLINF_TEST_PYTHONS names folders that have some")
    other = str(tmp_path / "bin" / "python")
    for command in (
        ["venv", "-q", "--python", found, str(tmp_path)],
        ["pip", "install", "-q", "--python", other, "gymnasium"],
    ):
        subprocess.run([find_uv_bin(), *command], check=True)
    assert [result for result in check_env(_config(other)) if not result.passed] == []
    for one, theirs in zip(_episodes(None), _episodes(other), strict=True):
        assert np.allclose(one, theirs, atol=1e-6)
