"""An evaluation that is interrupted or killed goes on from the episodes that have ended."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.runners import embodied_evaluation
from tests.runners.killing import ended, finish, start
from tests.runners.support import write_recipe

EPISODES = 120
EVALUATED = (f"evaluation.episodes={EPISODES}", "evaluation.num_envs=3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained for a step."""
    directory = tmp_path_factory.mktemp("trained")
    run = directory / "run"
    words = ["runner.total_env_steps=128", "evaluation.episodes=2", "evaluation.interval=0"]
    finish("train", str(write_recipe(directory)), "--run-dir", str(run), *words)
    return run


@pytest.fixture(scope="module")
def whole(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of an evaluation that was left alone."""
    run = copied(trained, tmp_path_factory.mktemp("whole"))
    finish("eval", str(run), *EVALUATED)
    return result(run).read_bytes()


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return copied(trained, tmp_path)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many episodes each evaluation of this process has played."""
    counts: list[int] = []
    play = embodied_evaluation.play_episodes

    def counted(groups, episodes, **given):
        counts.append(sum(map(bool, episodes)))
        return play(groups, episodes, **given)

    monkeypatch.setattr(embodied_evaluation, "play_episodes", counted)
    return counts


@pytest.fixture
def interrupted(
    monkeypatch: pytest.MonkeyPatch, run: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A run with an evaluation that was interrupted behind seven episodes."""
    del capsys  # what it says is for the test, too
    play = embodied_evaluation.play_episodes

    def cut_short(groups, episodes, **given):
        play(groups, episodes[:7], **given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(embodied_evaluation, "play_episodes", cut_short)
        assert main(["eval", str(run), *EVALUATED]) == 130
    return run


def copied(run: Path, directory: Path) -> Path:
    return Path(shutil.copytree(run, directory / run.name, symlinks=True))


def result(run: Path) -> Path:
    (found,) = (run / "evaluations").glob("spec_*.json")
    return found


def kept(run: Path) -> list[Path]:
    return list((run / "evaluations").glob("*.jsonl"))


def test_one_that_was_killed_plays_what_is_left_and_is_equal(
    run: Path, whole: bytes, played: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    process = start("eval", str(run), *EVALUATED)
    with ended(process):
        deadline = time.monotonic() + 120
        while not (files := kept(run)) or files[0].read_bytes().count(b"\n") < 12:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.wait(60)
    assert not list((run / "evaluations").glob("spec_*.json"))
    finish("eval", str(run), *EVALUATED)
    (count,) = played
    assert 0 < count <= EPISODES - 11
    assert f"{EPISODES - count} episodes were played before: rm " in capsys.readouterr().out
    assert result(run).read_bytes() == whole
    assert not kept(run)


def test_one_that_is_interrupted_says_what_is_kept(
    interrupted: Path, whole: bytes, played: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    told = "run step 1: 7 episodes are kept; the same command goes on from there"
    assert f"interrupted: {told}" in capsys.readouterr().err
    finish("eval", str(interrupted), *EVALUATED)
    assert played == [EPISODES - 7]
    assert result(interrupted).read_bytes() == whole


@pytest.mark.parametrize("other", ["evaluation.num_envs=2", "env.train.step_deadline=77"])
def test_what_was_played_in_another_way_is_played_anew(
    interrupted: Path, played: list[int], other: str
) -> None:
    finish("eval", str(interrupted), *EVALUATED, other)
    assert played == [EPISODES]
    assert not kept(interrupted)


def test_episodes_of_other_weights_are_played_anew(
    interrupted: Path, played: list[int], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    words = ["runner.total_env_steps=128", "evaluation.episodes=2", "evaluation.interval=0"]
    finish("train", str(write_recipe(tmp_path)), "--run-dir", str(other), *words, "seed=8")
    played.clear()
    shutil.rmtree(interrupted / "checkpoints")
    shutil.copytree(other / "checkpoints", interrupted / "checkpoints", symlinks=True)
    finish("eval", str(interrupted), *EVALUATED)
    assert played == [EPISODES]


def test_an_evaluation_of_which_all_was_played_is_written_down(
    run: Path, whole: bytes, played: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rlinf.runners.evaluation.save_printed", interrupt)
        assert main(["eval", str(run), *EVALUATED]) == 130
    finish("eval", str(run), *EVALUATED)
    assert played == [EPISODES, 1]
    assert result(run).read_bytes() == whole


def test_drawn_actions_are_those_of_an_env_so_that_nothing_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(groups, episodes, *, kept, **given):
        assert kept is None
        raise KeyboardInterrupt

    monkeypatch.setattr(embodied_evaluation, "play_episodes", interrupt)
    assert main(["eval", str(run), *EVALUATED, "evaluation.deterministic=false"]) == 130
    assert "nothing is written of what was played; begin anew" in capsys.readouterr().err
