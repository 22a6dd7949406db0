"""No run depends on the order of sets of names, which differs from process to process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import off_policy_support, reasoning_support, support
from .killing import COMMAND

TWO_RANKS = (
    "cluster.runtime=ray",
    "cluster.cpu_devices_per_node=2",
    "cluster.component_placement={'rollout,reward': '0', actor: '0-1'}",
    "runner.total_steps=2",
    "warm_start.steps=5",
)


def run(recipe: Path, directory: Path, overrides: tuple[str, ...], *, hash_seed: str) -> Path:
    """Train a recipe by the command line, in processes of this hash seed."""
    words = [*COMMAND, "train", str(recipe), *overrides, "--run-dir", str(directory)]
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write_recipe", "overrides", "assert_equal_runs"),
    [
        pytest.param(
            off_policy_support.write_recipe, (), support.assert_equal_runs, id="off-policy"
        ),
        pytest.param(
            reasoning_support.write_recipe,
            TWO_RANKS,
            reasoning_support.assert_equal_runs,
            id="two ranks",
        ),
    ],
)
def test_runs_under_other_hash_seeds_are_equal(
    tmp_path: Path,
    write_recipe: Callable[[Path], Path],
    overrides: tuple[str, ...],
    assert_equal_runs: Callable[[Path, Path], None],
) -> None:
    recipe = write_recipe(tmp_path)
    first, second = (run(recipe, tmp_path / seed, overrides, hash_seed=seed) for seed in ("1", "2"))
    assert_equal_runs(first, second)
