"""Recipes that train in simulators, looked at where those simulators are not installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rlinf.cli.tasks import read_config
from rlinf.config.load import load_recipe, recipe_names
from rlinf.envs.installation import requirements_of
from rlinf.workers.config.acting import ActingConfig

from .conftest import rlinf

NAMES = [name for name in recipe_names() if name.startswith("embodied/")]


def env_type(name: str) -> str:
    return str(load_recipe(name).data["env"]["train"]["type"])


def to_install(name: str) -> str | None:
    """What must be installed beside this package; None for what `pip install` can bring along."""
    needs = requirements_of(env_type(name))
    return None if needs is None or needs.extra else env_type(name)


APART = [name for name in NAMES if to_install(name)]


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "envs"))


@pytest.fixture
def simulators_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks that start nothing: they look only whether the package is there."""
    real = importlib.util.find_spec
    modules = {needs.module for n in APART if (needs := requirements_of(env_type(n)))}

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return real("json") if name in modules else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_first_what_it_is_and_needs(name: str) -> None:
    lines = Path("recipes", f"{name}.yaml").read_text().splitlines()
    comment = [line for line in lines[:5] if line.startswith("#")]
    assert 2 <= len(comment) <= 4
    needed = to_install(name)
    if needed is not None:
        assert f"rlinf env install {needed}" in " ".join(comment)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("simulators_are_here")
def test_its_values_are_accepted_and_it_is_evaluated_at_its_end(name: str) -> None:
    _, _, config = read_config(name, [])
    assert isinstance(config, ActingConfig)
    assert config.evaluation.episodes >= 100
    steps, interval = config.training_steps, config.evaluation.interval
    assert steps >= interval > 0


@pytest.mark.parametrize("name", APART)
def test_without_its_simulator_one_line_says_what_to_install(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = rlinf(capsys, "train", name, "--dry-run")
    assert code == 2
    (line,) = (line for line in error.splitlines() if "missing" in line)
    assert f"run `rlinf env install {to_install(name)}`" in line
