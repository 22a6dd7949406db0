"""What becomes of a run whose small files were damaged: a line that says which, or no harm."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlinf.checkpoint.store import CheckpointStore
from rlinf.cli.main import main
from rlinf.runners.evaluation import Evaluator

WORDS = [
    "train", "quickstart", "env.num_envs=2", "rollout.steps=4", "runner.total_env_steps=16",
    "actor.global_batch_size=8", "evaluation.interval=0", "evaluation.episodes=2",
    "evaluation.num_envs=2", "evaluation.video_episodes=0", "evaluation.stop_at_success=null",
    "env.train.max_episode_steps=8", "env.train.processes=1", "logger.backends=[]",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main([*WORDS, "--run-dir", str(run)]) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize("content", [b"", b"null", b"{}"])
def test_a_damaged_origin_is_named_with_what_to_do(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "origin.json").write_bytes(content)
    assert main(["resume", str(run)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "origin.json is damaged" in told
    assert "or delete it" in told
    (run / "origin.json").unlink()
    assert main(["resume", str(run)]) == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"observation_shapes": {}}', b"\xff"])
def test_damaged_observations_are_named_with_what_to_do(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "env_spec.json").write_bytes(content)
    assert main(["serve", "policy", str(run), "--port", "0"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "env_spec.json is damaged" in told
    assert "or delete it" in told


def test_a_checkpoint_outside_of_its_run_is_told_as_such(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = shutil.copytree(run / "checkpoints" / "latest", tmp_path / "mine" / "kept")
    assert main(["eval", str(kept)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "mine/kept is a checkpoint outside of its run" in told


@pytest.mark.parametrize(
    ("part", "why"),
    [("run", "holds another state than is read here"), ("workers", "holds nothing of env, actor")],
)
def test_a_checkpoint_of_another_version_is_told_in_a_line(
    run: Path, part: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointStore(run / "checkpoints") as store:
        found = store.load()
        store.save(found.step, {**found.tree, part: {"of_a_later_one": 1}}, blocking=True)
    assert main(["resume", str(run), "runner.total_env_steps=24"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{found.path.name} {why}" in told
    assert "of another version of the code, or of another recipe" in told
    if part == "workers":
        assert main(["eval", str(run)]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert f"{found.path.name} holds another state than is read here (KeyError: 'actor'" in told


@pytest.mark.parametrize("content", [b"", b"null"])
def test_a_damaged_end_is_written_anew(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run / "end.json").read_bytes()
    (run / "end.json").write_bytes(content)
    assert main(["resume", str(run)]) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert (run / "end.json").read_bytes() == whole


@pytest.mark.parametrize("content", [None, b'{"step": "x", "time": 1}\n'])
def test_a_run_without_metrics_comes_to_its_end(
    run: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "end.json").unlink()
    (run / "metrics.jsonl").unlink()
    if content is not None:
        (run / "metrics.jsonl").write_bytes(content)
    assert main(["resume", str(run)]) == 0
    assert (run / "end.json").is_file()
    assert main(["view", str(run)]) == 0


def test_a_view_passes_over_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "timeline.json").write_bytes(b"[\n\xff\x00,\n{]\n")
    (run / "plan.yaml").write_text("seed: 1\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1, "env/success": [1]}\n')
    assert main(["view", str(run)]) == 0
    told = capsys.readouterr().err
    assert "has no key `components`; shown is the plan of the configuration" in told
    assert (run / "report.html").is_file()
    (run / "plan.yaml").write_bytes(bytes(400))
    assert main(["view", str(run)]) == 0
    assert "shown is the plan of the configuration" in capsys.readouterr().err


def test_a_timeline_that_is_gone_is_not_one_of_a_run_without_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("timeline: false", "timeline: true"))
    assert main(["view", str(run)]) == 0
    assert "timeline.json, is gone, or holds no step" in " ".join(capsys.readouterr().err.split())
    (run / "end.json").unlink()
    assert main(["view", str(run)]) == 0
    assert "no training step has ended yet" in " ".join(capsys.readouterr().err.split())


def test_a_component_of_another_type_takes_of_the_former_keys_what_it_knows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run), "actor.type=fsdp"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "a resumed run keeps what it trains; not changeable: actor.type" in told
    assert main(["resume", str(run), "weight_sync.type=bucket"]) == 0
    assert "type: bucket" in (run / "config.yaml").read_text()
    assert main(["resume", str(run), "weight_sync.type=buckt"]) == 2
    assert "did you mean `bucket`?" in capsys.readouterr().err


class NoRoom(Evaluator[Any, Any]):
    """Finds the disk full whenever it writes."""

    def spec(self, purpose: Any, items: int | None = None) -> Any:
        return self

    def check(self, spec: Any) -> None: ...

    def play(self, groups: Any, spec: Any, name: str) -> Any:
        return self

    def metrics(self, result: Any) -> dict[str, float]:
        return {"eval/success": 0.25}

    def save(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_an_evaluation_on_a_full_disk_is_logged_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups: Any = None
    found = NoRoom().of_run(groups, "periodic", "here", 3, directory=tmp_path)
    assert found is not None
    assert found.score == 0.25
    assert caplog.text.count("The disk is full") == 2
    assert "periodic_step_00000003.json is not written" in caplog.text


@pytest.mark.parametrize(
    ("name", "directory"),
    [("checkpoints", False), ("evaluations", False), ("run.log", True), ("metrics.jsonl", True)],
)
def test_a_file_where_a_directory_belongs_is_named(
    run: Path, name: str, directory: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.mkdir() if directory else place.touch()
    assert main(["resume", str(run)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{name} is a {'directory' if directory else 'file'}, where a run has a" in told
