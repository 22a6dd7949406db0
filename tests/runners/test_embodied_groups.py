"""Groups of episodes keep together and all are counted, however they end, and to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.workers import env
from rlinf.workers.env import EnvWorker

from .killing import finish, kill_and_resume
from .support import assert_equal_runs, divided, metrics, small_config, write_recipe
from .test_equality import needs_two_cores
from .test_resume import EMBODIED

STROLLS = "env.train.options={id: 'tests.runners.odd_envs:Strolls-v0'}"
GRPO = (
    "algorithm.type=grpo", "~algorithm.gamma", "~algorithm.normalize_rewards",
    "env.train.group_size=4", "env.train.max_episode_steps=16", STROLLS,
    "actor.micro_batch_size=null", "evaluation.interval=2",
)  # fmt: skip


def trained(directory: Path, steps: int, *overrides: str) -> Path:
    directory.mkdir(exist_ok=True)
    run = directory / "run"
    given = [*GRPO, f"runner.total_env_steps={steps * 128}", *overrides]
    finish("train", str(write_recipe(directory)), *given, "--run-dir", str(run))
    return run


def episodes(run: Path) -> list[float]:
    return [line["rollout/trained_episodes"] for line in metrics(run)]


def ended(run: Path) -> list[float]:
    """Episodes that ended in each step."""
    totals = [line["env/episodes"] for line in metrics(run)]
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]


def test_a_fault_costs_its_episode_in_one_rollout(tmp_path: Path) -> None:
    failing = "env.train.options.kwargs={failing: 20}"
    # None ends before its time: a rollout holds one episode of each environment.
    run = trained(tmp_path, 6, failing, "env.train.ignore_terminations=true")
    assert sum("env/faults/exception" in line for line in metrics(run)) == 1
    assert sorted(episodes(run)) == [7.0] + [8.0] * 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("groups"), 16, "rollout.block_size=4")


def test_members_that_end_early_stay_with_their_siblings(run: Path) -> None:
    found = episodes(run)
    assert len(found) == 16
    assert min(found) >= 8, "the first episodes of all environments are whole, and of equal seeds"


def test_success_is_counted_among_all_and_not_among_those_that_end_early(run: Path) -> None:
    lines = metrics(run)
    # Of each environment the first alone: shares are eighths, and others ended, too.
    assert all((8 * line["env/success_once"]).is_integer() for line in lines)
    assert all(n >= trained for n, trained in zip(ended(run), episodes(run), strict=True))
    assert lines[-1]["env/episodes"] > 8 * len(lines)
    assert all(line["env/episode_len"] <= 16 for line in lines)
    assert any(0 < line["env/success_once"] < 1 for line in lines)


def test_failures_are_told_once_there_was_one(run: Path) -> None:
    found = [line.get("env/fail_once") for line in metrics(run)]
    told = [share for share in found if share is not None]
    assert told
    assert found[-len(told) :] == told, "none is left out after the first"
    assert 0 < told[0] <= 1


def test_so_it_is_where_a_rollout_cuts_episodes(tmp_path: Path) -> None:
    given = [
        STROLLS, "env.train.max_episode_steps=32", "env.train.auto_reset=false", "rollout.steps=8",
        "runner.total_env_steps=512",
    ]  # fmt: skip
    finish("train", str(write_recipe(tmp_path)), *given, "--run-dir", str(tmp_path / "run"))
    lines = metrics(tmp_path / "run")
    assert len(lines) == 8
    # Nothing but a success ends one here; the others are cut, and counted among the means alone.
    assert ended(tmp_path / "run") == [8 * line["env/success_once"] for line in lines]
    assert all(line["env/success_once"] < 1 and line["env/episode_len"] <= 8 for line in lines)


@needs_two_cores
@divided
def test_placements_change_nothing(run: Path, tmp_path: Path, overrides: list[str]) -> None:
    assert_equal_runs(run, trained(tmp_path, 16, "rollout.block_size=4", *overrides))


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    def overrides(runtime: str, steps: int) -> list[str]:
        return [*EMBODIED.overrides(runtime, steps), *GRPO, "rollout.max_staleness=1"]

    grouped = replace(EMBODIED, overrides=overrides)
    kill_and_resume(grouped, tmp_path, "local", kills=1, steps=8, victim="driver")


@pytest.mark.parametrize(
    ("algorithm", "own", "told"),
    [("grpo", (), True), ("grpo", ("env.train.auto_reset=false",), False), ("ppo", (), False)],
)
def test_a_run_that_began_its_rollouts_otherwise_is_told_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    own: tuple[str, ...],
    told: bool,
) -> None:
    monkeypatch.setattr(env.StageWorker, "__init__", lambda self: None)
    monkeypatch.setattr(EnvWorker, "_rank", 0, raising=False)
    monkeypatch.setattr(EnvWorker, "_world_size", 1, raising=False)
    monkeypatch.setattr(env, "divided", lambda states, ranks: states)
    given = () if algorithm == "ppo" else (*GRPO, *own)
    worker = EnvWorker(small_config(tmp_path, *given), SimpleNamespace(trains=True))
    worker._set_aside = {"seeds": 0}
    state = {**worker.state(), "was_reset": True}
    worker.load_state([state])
    assert not caplog.records
    del state["begins_afresh"]  # as an earlier version wrote it
    worker.load_state([{**state, "was_reset": False}])  # before its first rollout
    assert not caplog.records
    worker.load_state([state])
    assert caplog.text.count("now every rollout begins with a reset, as `grpo`") == told
