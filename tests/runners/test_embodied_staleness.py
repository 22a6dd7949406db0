"""Embodied rollouts that run ahead of training: the same bits wherever they run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.config.dump import to_yaml
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.embodied import Embodied
from rlinf.runners.run import Run

from .killing import Task, kill_and_resume, train_without_a_simulator
from .support import assert_equal_runs, metrics, small_config, write_recipe
from .test_equality import PLACEMENTS, needs_two_cores, train
from .test_reasoning import StopAfter
from .test_resume import EMBODIED, REASONING, overrides, reasoning_overrides

AHEAD = ("rollout.max_staleness=1", "rollout.block_size=4", "algorithm.type=decoupled_ppo")
SPLIT = "cluster.cpu_devices_per_node=2"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ahead") / "one", *AHEAD)


def test_samples_are_as_old_as_the_rule_says(reference: Path) -> None:
    lines = metrics(reference)
    assert [line["rollout/staleness"] for line in lines] == [0, *[1] * (len(lines) - 1)]
    assert all(line["rollout/staleness_share/1"] == 1 for line in lines[1:])
    assert "actor/first_update_kl" in lines[0]
    assert "actor/first_update_kl" not in lines[1]
    assert lines[0]["actor/proximal_ratio"] == pytest.approx(1)
    assert lines[-1]["actor/proximal_ratio"] != 1


SLOW = {"collocated", "one device"}


@needs_two_cores
@pytest.mark.parametrize(
    "placement",
    [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in PLACEMENTS],
)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    place = f"cluster.component_placement={PLACEMENTS[placement]}"
    assert_equal_runs(reference, train(tmp_path / "run", *AHEAD, SPLIT, place))


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("placement", ["disaggregated", "hybrid"])
def test_ray_gives_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    place = f"cluster.component_placement={PLACEMENTS[placement]}"
    run = train(tmp_path / "run", *AHEAD, SPLIT, place, "cluster.runtime=ray")
    assert_equal_runs(reference, run)


@pytest.mark.parametrize("questions", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_what_was_collected_ahead_outlives_an_interruption(
    reference: Path, tmp_path: Path, questions: int
) -> None:
    config = small_config(tmp_path, *AHEAD)
    with RunDirectory.create(config.runner.output_dir, "small", path=tmp_path / "run") as run:
        run.write_config(to_yaml(config))
        Run(Embodied, config, run, StopAfter(questions)).run()
    assert len(metrics(run.path)) < len(metrics(reference))
    with RunDirectory.open(run.path) as directory:
        Run(Embodied, config, directory, threading.Event()).run(resume=True)
    assert_equal_runs(reference, run.path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("task", [EMBODIED, REASONING], ids=["embodied", "reasoning"])
def test_killed_at_random_moments(tmp_path: Path, task: Task, runtime: str) -> None:
    given = overrides if task is EMBODIED else reasoning_overrides

    def ahead(runtime: str, steps: int) -> list[str]:
        return [*given(runtime, steps), "rollout.max_staleness=2"]

    task = replace(task, overrides=ahead)
    kill_and_resume(task, tmp_path, runtime, kills=4, steps=12, victim="driver")


@pytest.mark.slow
def test_a_killed_simulator_is_rebuilt_while_training_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["runner.total_env_steps=3840", "rollout.max_staleness=1"]
    train_without_a_simulator(write_recipe(tmp_path), run, options)
    lines = metrics(run)
    assert len(lines) == 30
    assert sum(line.get("env/faults/crash", 0) for line in lines) >= 1
