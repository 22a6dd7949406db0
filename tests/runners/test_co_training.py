"""Runs in simulators that go on imitating what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main

from . import support
from .supervised_support import assert_equal_runs, demonstrations, run_recipe
from .test_reasoning import StopAfter

SHOWN = "demonstrations={path: %s, weight: 1.0, objective: squared_error}"
SHORT = (
    "runner.total_env_steps=512",
    "evaluation.interval=0",
    "evaluation.stop_at_success=null",
    "actor.optim.lr=3.0e-3",
)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recorded") / "episodes"
    demonstrations().save(path)
    return SHOWN % path


def test_recorded_actions_are_imitated_beside_the_own_ones(tmp_path: Path, episodes: str) -> None:
    recipe = support.write_recipe(tmp_path)
    run_recipe(recipe, tmp_path / "run", *SHORT, episodes)
    found = [each["actor/imitation_loss"] for each in support.metrics(tmp_path / "run")[:4]]
    assert len(found) == 4
    assert found[-1] < 0.7 * found[0]


def test_two_ranks_and_another_place_change_nothing(
    tmp_path: Path, episodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    recipe = support.write_recipe(tmp_path)
    run_recipe(recipe, tmp_path / "one", *SHORT, episodes)
    place = "cluster.component_placement={source: '1', actor: '0-1', 'env,rollout': '0'}"
    devices = "cluster.cpu_devices_per_node=2"
    run_recipe(recipe, tmp_path / "several", *SHORT, episodes, place, devices)
    assert_equal_runs(tmp_path / "one", tmp_path / "several")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["demonstrations={path: nowhere}"], "there are no demonstrations in nowhere"),
        (["demonstrations.held_out=1"], "nothing validates here"),
        (["demonstrations.objective=model"], "mlp has no supervised loss of its own"),
        (["env.train.options.id=MountainCarContinuous-v0"], "the episodes have observation_shapes"),
    ],
)
def test_what_cannot_be_is_said(
    overrides: list[str], said: str, tmp_path: Path, episodes: str, capsys: pytest.CaptureFixture
) -> None:
    recipe = support.write_recipe(tmp_path)
    place = ["--run-dir", str(tmp_path / "run")]
    assert main(["train", str(recipe), *SHORT, episodes, *overrides, *place]) == 2
    assert said in capsys.readouterr().err


def test_a_run_ahead_of_its_updates_goes_on_with_the_demonstrations_it_has_drawn(
    tmp_path: Path, episodes: str
) -> None:
    recipe = support.write_recipe(tmp_path)
    ahead = (*SHORT, episodes, "rollout.max_staleness=1", "algorithm.type=decoupled_ppo")
    run_recipe(recipe, tmp_path / "whole", *ahead)
    run_recipe(recipe, tmp_path / "part", *ahead, stop=StopAfter(2))
    assert not (tmp_path / "part" / "policy.safetensors").exists()
    assert main(["resume", str(tmp_path / "part")]) == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "part")
