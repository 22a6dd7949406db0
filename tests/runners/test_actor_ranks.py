"""Whole runs in which several processes train one model."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("ray")

from rlinf.checkpoint.contents import load_checkpoint
from rlinf.cli.main import main
from rlinf.monitor.decisions import read_decisions
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.run import Run
from rlinf.scheduler.cpu_slots import available_cores

from .killing import kill_and_resume
from .reasoning_support import assert_equal_runs, small_config, train, untimed, weights
from .test_resume import REASONING, reasoning_overrides

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(len(available_cores()) < 2, reason="two CPU slots need two cores"),
]

ON_RAY = ("cluster.runtime=ray", "cluster.cpu_devices_per_node=2")
TWO = "cluster.component_placement={'rollout,reward': '0', actor: '0-1'}"
SHARDED = "checkpoint.layout=sharded"
ONE = "cluster.component_placement={'rollout,reward': '0', actor: '1'}"

STEPS = 3
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Bound of the difference of metrics and weights: two ranks add the same float32 numbers in another
order. Weights were seen to differ by 6e-8."""


def assert_close_runs(one: Path, other: Path) -> None:
    """Metrics and weights of two runs differ by rounding only."""
    first, second = untimed(one), untimed(other)
    assert len(first) == len(second) > STEPS
    for left, right in zip(first, second, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            value = left[name]
            assert right[name] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE), name
    before, after = weights(one), weights(other)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("one"), f"runner.total_steps={STEPS}")


def test_two_ranks_train_what_one_trains(one_rank: Path, tmp_path: Path) -> None:
    run = train(tmp_path, f"runner.total_steps={STEPS}", *ON_RAY, TWO)
    assert_close_runs(one_rank, run)


def test_two_ranks_in_micro_batches_are_as_far_from_the_reference(tmp_path: Path) -> None:
    penalised = (f"runner.total_steps={STEPS}", "algorithm={type: rloo, kl_reward_beta: 0.05}")
    one = train(tmp_path / "one", *penalised)
    pieces = train(tmp_path / "two", *penalised, *ON_RAY, TWO, "actor.micro_batch_size=1")
    assert_close_runs(one, pieces)
    for run in (one, pieces):
        told = [line for line in untimed(run) if "actor/loss" in line]
        assert all("rollout/reference_kl" in line for line in told)


@pytest.mark.parametrize(("before", "after"), [(TWO, ONE), (ONE, TWO)], ids=["to one", "to two"])
def test_a_run_goes_on_with_another_number_of_ranks(
    one_rank: Path, tmp_path: Path, before: str, after: str
) -> None:
    stop = threading.Event()
    run = train(tmp_path, "runner.total_steps=2", *ON_RAY, before, stop=stop)
    with RunDirectory.open(run) as directory:
        longer = small_config(tmp_path, f"runner.total_steps={STEPS}", *ON_RAY, after)
        Run(Reasoning, longer, directory, threading.Event()).run(resume=True)
    assert_close_runs(one_rank, run)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("two"), f"runner.total_steps={STEPS}", *ON_RAY, TWO)


def stopped_and_resumed(directory: Path, before: list[str], after: list[str]) -> Path:
    """A run of which one step is made from a checkpoint."""
    run = train(directory, f"runner.total_steps={STEPS - 1}", *before)
    with RunDirectory.open(run) as opened:
        longer = small_config(directory, f"runner.total_steps={STEPS}", *after)
        Run(Reasoning, longer, opened, threading.Event()).run(resume=True)
    return run


def test_parts_of_a_checkpoint_are_what_the_whole_is(two_ranks: Path, tmp_path: Path) -> None:
    """Resumed with two ranks the run is that which was not stopped, with one as from the whole."""
    whole, parts = [*ON_RAY, TWO], [*ON_RAY, TWO, SHARDED]
    again = stopped_and_resumed(tmp_path / "two", parts, parts)
    assert_equal_runs(two_ranks, again)
    checkpoints = again / "checkpoints"
    files = {path.name for path in (checkpoints / "step_00000001" / "actor").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert load_checkpoint(checkpoints / "latest").tree["workers"]["actor"]["trainer"] is None
    assert main(["convert", "run", str(again), "--out", str(tmp_path / "model")]) == 0
    for file in (again / "model").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes(), file.name
    local = [SHARDED]
    alone = stopped_and_resumed(tmp_path / "one", parts, local)
    assert_equal_runs(stopped_and_resumed(tmp_path / "whole", whole, local), alone)
    assert_close_runs(two_ranks, alone)
    assert not (alone / "checkpoints" / f"step_{STEPS:08d}" / "actor").exists()


def test_parts_of_actor_and_critic(tmp_path: Path) -> None:
    placed = "cluster.component_placement={'rollout,reward': '0', 'actor,critic': '0-1'}"
    critic = "critic={n_minibatches: 2, optim: {lr: 1.0e-3}}"
    ppo = ["algorithm={type: ppo}", critic, *ON_RAY, placed, SHARDED]
    expected = train(tmp_path / "expected", f"runner.total_steps={STEPS}", *ppo)
    assert_equal_runs(expected, stopped_and_resumed(tmp_path / "resumed", ppo, ppo))
    latest = expected / "checkpoints" / "latest"
    assert {path.name for path in latest.iterdir() if path.is_dir()} == {"actor", "critic"}


def test_parts_go_to_other_ranks_when_the_placement_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that looks for its best placement tries one rank and two, and trains on as it would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steps = "runner.total_steps=10"
    expected = train(tmp_path / "expected", steps)
    auto = "cluster.plan={auto: {steps: 1, least_gain: 0.0}}"
    moved = train(tmp_path / "moved", steps, *ON_RAY, TWO, SHARDED, auto)
    assert_close_runs(expected, moved)
    decisions = read_decisions(moved)
    tried = [d.plan["components"]["actor"]["devices"] for d in decisions if d.plan is not None]
    assert {"0-1"} < {str(devices) for devices in tried}, "both, and one alone"
    assert "drop" not in {decision.what for decision in decisions}


def test_two_ranks_of_actor_and_critic(tmp_path: Path) -> None:
    ppo = (
        f"runner.total_steps={STEPS}",
        "algorithm={type: ppo}",
        "critic={n_minibatches: 2, optim: {lr: 1.0e-3}}",
    )
    placement = "cluster.component_placement={'rollout,reward': '0', 'actor,critic': '0-1'}"
    one = train(tmp_path / "one", *ppo)
    assert_close_runs(one, train(tmp_path / "two", *ppo, *ON_RAY, placement))


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_a_killed_rank_ends_the_run_which_goes_on_from_there(tmp_path: Path, layout: str) -> None:
    def overrides(runtime: str, steps: int) -> list[str]:
        given = reasoning_overrides(runtime, steps)
        return [*given, "cluster.cpu_devices_per_node=2", TWO, f"checkpoint.layout={layout}"]

    ranks = replace(REASONING, overrides=overrides, workers=("LanguageActorW",))
    kill_and_resume(ranks, tmp_path, "ray", kills=2, steps=8, victim="worker")
