"""Rollouts that run ahead of training: the same bits wherever they run, and after a kill."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.errors import UserError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.run import Run

from .reasoning_support import assert_equal_runs, resume, small_config, train, untimed
from .test_reasoning import PLACEMENTS, StopAfter, needs_two_cores

AHEAD = "rollout.max_staleness=1"
DECOUPLED = "algorithm={type: decoupled_ppo}"


def placed(placement: str, *more: str) -> tuple[str, ...]:
    return (
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS[placement]}",
        *more,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ahead"), AHEAD)


def shares(line: dict[str, float]) -> dict[int, float]:
    prefix = "rollout/staleness_share/"
    return {int(k.removeprefix(prefix)): v for k, v in line.items() if k.startswith(prefix)}


def test_tokens_are_as_old_as_the_rule_says(reference: Path) -> None:
    lines = untimed(reference)[1:]
    assert [shares(line) for line in lines] == [{0: 1.0}, {1: 1.0}, {1: 1.0}, {1: 1.0}]
    assert [line["rollout/staleness_max"] for line in lines] == [0, 1, 1, 1]
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 1, 1]


@needs_two_cores
@pytest.mark.parametrize(
    "placement",
    [
        "disaggregated",
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("one device", marks=pytest.mark.slow),
        pytest.param("two engines", marks=pytest.mark.slow),
    ],
)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    assert_equal_runs(reference, train(tmp_path, AHEAD, *placed(placement)))


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("syncer", ["auto", "bucket", "patch"])
def test_ray_gives_the_same_bits(reference: Path, tmp_path: Path, syncer: str) -> None:
    sync = f"weight_sync={{type: {syncer}}}"
    run = train(tmp_path, AHEAD, "cluster.runtime=ray", sync, *placed("disaggregated"))
    assert_equal_runs(reference, run)


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("staleness", [2, 9])
def test_more_steps_ahead(tmp_path: Path, staleness: int) -> None:
    ahead = f"rollout.max_staleness={staleness}"
    one = train(tmp_path / "one", ahead, "runner.total_steps=6")
    two = train(tmp_path / "two", ahead, "runner.total_steps=6", *placed("disaggregated"))
    assert_equal_runs(one, two)
    ages = [line["rollout/staleness"] for line in untimed(one)[1:]]
    assert ages == [min(step, staleness) for step in range(6)]


@pytest.mark.parametrize(
    "questions",
    [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_what_was_generated_ahead_outlives_an_interruption(
    reference: Path, tmp_path: Path, questions: int
) -> None:
    run = train(tmp_path, AHEAD, stop=StopAfter(questions))
    assert len(untimed(run)) < 5
    resume(run, small_config(tmp_path, AHEAD))
    assert_equal_runs(reference, run)


SLOW_REWARD = """
import time

def late(sample):
    time.sleep(0.02)
    return 0.0
"""


@needs_two_cores
def test_prompts_of_rollouts_under_way_are_drawn_once(tmp_path: Path) -> None:
    """A checkpoint waits for rollouts that are slower than training, and these draw meanwhile."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    late = f"reward.functions.late={{type: function, function: {tmp_path}/slow.py:late}}"
    words = placed(
        "disaggregated", "rollout.max_staleness=2", late, "validation.correct_by=answer",
        "validation.val_check_interval=0", "runner.total_steps=6",
    )  # fmt: skip
    run, cut = train(tmp_path, *words), tmp_path / "cut"
    shutil.copytree(run, cut)
    for step in range(2, 7):
        shutil.rmtree(cut / "checkpoints" / f"step_{step:08}")
    resume(cut, small_config(tmp_path, *words))
    assert_equal_runs(run, cut)


def test_hints_about_lengths_are_kept_in_checkpoints(tmp_path: Path) -> None:
    words = (AHEAD, "actor.order=length", "actor.shuffle=false")
    one = train(tmp_path / "one", *words)
    two = train(tmp_path / "two", *words, stop=StopAfter(2))
    resume(two, small_config(tmp_path / "two", *words))
    assert_equal_runs(one, two)


@pytest.mark.slow
def test_prompts_drawn_again_are_counted_once(tmp_path: Path) -> None:
    again = "algorithm={type: grpo, dynamic_sampling: true, max_resample: 3}"
    one = train(tmp_path / "one", AHEAD, again)
    two = train(tmp_path / "two", AHEAD, again, stop=StopAfter(2))
    with RunDirectory.open(two) as directory:
        Run(
            Reasoning, small_config(tmp_path / "two", AHEAD, again), directory, threading.Event()
        ).run(resume=True)
    assert_equal_runs(one, two)
    lines = untimed(one)[1:]
    rejected = sum(line["rollout/rejected_groups"] for line in lines)
    assert lines[-1]["rollout/prompts"] == 16 + rejected > 16


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("broken", ["rollout", "actor"])
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_worker_that_fails_ahead_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, broken: str
) -> None:
    from .failing_workers import FailingActor, FailingGeneration

    if broken == "rollout":
        monkeypatch.setitem(Reasoning.groups, "rollout", FailingGeneration)
    else:
        monkeypatch.setitem(Reasoning.groups, "actor", FailingActor)
    with pytest.raises(ArithmeticError, match=f"the {broken} broke"):
        train(tmp_path, AHEAD, f"cluster.runtime={runtime}", *placed("disaggregated"))


@pytest.mark.slow
def test_decoupled_ppo_trains_on_stale_data(tmp_path: Path) -> None:
    lines = untimed(train(tmp_path, AHEAD, DECOUPLED))[1:]
    assert lines[0]["actor/importance_weight"] == pytest.approx(1, abs=1e-4)
    assert lines[-1]["actor/importance_weight"] != 1


def test_an_engine_that_gives_its_weights_back_cannot_run_ahead(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.max_staleness"):
        small_config(tmp_path, AHEAD, "cluster.residency={rollout: offload}")
    small_config(tmp_path, "cluster.residency={rollout: offload}")


@pytest.mark.slow
def test_with_a_critic(tmp_path: Path) -> None:
    critic = (AHEAD, "algorithm={type: ppo}", "critic={n_minibatches: 2, optim: {lr: 1.0e-3}}")
    whole = train(tmp_path / "whole", *critic)
    run = train(tmp_path / "cut", *critic, stop=StopAfter(2))
    with RunDirectory.open(run) as directory:
        Run(Reasoning, small_config(tmp_path / "cut", *critic), directory, threading.Event()).run(
            resume=True
        )
    assert_equal_runs(whole, run)
