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

import rlinf
from rlinf.envs.config import EnvConfig
from rlinf.envs.supervised.vector import SupervisedVectorEnv

OLDEST = "3.8"
PACKAGE = Path(rlinf.__file__).parent
ROOTS = ("rlinf.envs.supervised.process", "rlinf.envs.option_check")


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


def _others() -> list[str]:
    """Interpreters of other versions: on the path, and in ``RLINF_TEST_PYTHONS``."""
    mine = sys.version_info[1]
    there = [shutil.which(f"python3.{minor}") for minor in range(8, 15) if minor != mine]
    named = os.environ.get("RLINF_TEST_PYTHONS", "").split(os.pathsep)
    return [each for each in [*there, *named] if each]


@pytest.mark.slow
def test_envs_run_under_every_other_interpreter_that_is_there(tmp_path: Path) -> None:
    others = _others()
    if not others:
        pytest.skip("no interpreter of another version; RLINF_TEST_PYTHONS names some")
    from uv import find_uv_bin

    def episodes(python: str | None) -> list[np.ndarray]:
        config = EnvConfig(
            type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=10,
            processes=1, python=python,
        )  # fmt: skip
        config.check()
        with SupervisedVectorEnv(config, num_envs=2, seed=3) as env:
            seen = [env.reset()["states"]]
            for _ in range(6):
                step = env.chunk_step(np.full((2, 3, 1), 0.5, np.float32))
                assert step.valid.all()
                seen.append(step.observations["states"])
        return seen

    ours = episodes(None)
    for number, other in enumerate(others):
        directory = tmp_path / str(number)
        for command in (
            ["venv", "-q", "--python", other, str(directory)],
            ["pip", "install", "-q", "--python", str(directory / "bin/python"), "gymnasium"],
        ):
            subprocess.run([find_uv_bin(), *command], check=True)
        for one, theirs in zip(ours, episodes(str(directory / "bin/python")), strict=True):
            assert np.allclose(one, theirs, atol=1e-6), other
