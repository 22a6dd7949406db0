"""A run is served from the command line, and evaluated through its server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import SecretStr

from rlinf.checkpoint.contents import load_checkpoint
from rlinf.checkpoint.store import CheckpointStore
from rlinf.cli.main import main
from rlinf.cli.tasks import task_of_run
from rlinf.data.episode_evaluation import EvaluationResult
from rlinf.errors import CheckpointError, ConfigError
from rlinf.runners.embodied_evaluation import TrainedPolicy
from rlinf.runners.evaluation import evaluate
from rlinf.serving.client import ActionClient
from rlinf.serving.remote import RemoteConfig

from ..runners.off_policy_support import train

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = "runner.total_env_steps=256", "model.num_action_chunks=2"
    return train(tmp_path_factory.mktemp("run"), *short)


class Served:
    """``rlinf serve policy`` in a process of its own."""

    def __init__(self, run: Path, *options: str) -> None:
        program = "import sys; from rlinf.cli.main import main; sys.exit(main())"
        words = [sys.executable, "-c", program, "serve", "policy", str(run), "--port", "0"]
        self.process = subprocess.Popen(
            [*words, *options], stdout=subprocess.PIPE, text=True, env=self.environment()
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"ws://\S+:\d+", self.said)
        assert found, self.said
        self.url = found[0]

    @staticmethod
    def environment() -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key != "RLINF_SERVE_TOKEN"}

    def stop(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return said


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Served]:
    server = Served(run, "--token", TOKEN, "--follow")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def outcomes(run: Path, pattern: str) -> Any:
    (file,) = (run / "evaluations").glob(pattern)
    return {k: v for k, v in json.loads(file.read_text()).items() if k != "checkpoint"}


def test_evaluation_through_the_server_is_that_in_this_process(
    run: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    here = evaluate(task_of_run(run), run, items=6)
    assert len({outcome.episode_return for outcome in here.outcomes}) == 6  # no row is another's
    words = ["eval", str(run), "--episodes", "6", "--server"]
    assert main([*words, served.url, "--token", TOKEN]) == 0
    assert f"run step 2 at {served.url}: success rate" in capsys.readouterr().out
    assert outcomes(run, "spec*2.json") == outcomes(run, "spec*_served_run.json")
    assert main([*words, served.url, "--token", "another"]) == 2
    assert "HTTP 401" in capsys.readouterr().err
    assert main([*words, "nonsense"]) == 2
    assert "--server = 'nonsense' is no address" in capsys.readouterr().err
    drawn = "evaluation.deterministic=false"
    assert main([*words, served.url, "--token", TOKEN, drawn]) == 2
    told = "acts by the mode of its policy; legal: true, or a server with --drawn"
    assert told in capsys.readouterr().err
    draws = Served(str(run), "--token", TOKEN, "--drawn")
    assert "acts by drawn actions (--drawn) at ws://" in draws.said
    assert main([*words, draws.url, "--token", TOKEN]) == 2
    assert "draws actions; legal: false, or a server with --mode" in capsys.readouterr().err
    assert main([*words, draws.url, "--token", TOKEN, drawn]) == 0
    assert "by drawn actions" in capsys.readouterr().out
    draws.stop(signal.SIGTERM)
    assert outcomes(run, "spec*_drawn_served_run.json") != outcomes(run, "spec*2_served_run.json")
    assert main(["serve", "policy", str(run), "--host", "192.0.2.1"]) == 2
    assert "cannot listen at 192.0.2.1" in capsys.readouterr().err


def test_what_a_recipe_begins_with_is_evaluated_and_served(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, file = run / "config.yaml", run / "policy.safetensors"
    begun = f"model.path={file}"
    words = ["eval", str(recipe), begun, f"runner.output_dir={tmp_path}", "--episodes", "6"]
    assert main([*words, "--dry-run"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    assert main(words) == 0
    assert f"{file}: success rate" in capsys.readouterr().out
    trained = evaluate(task_of_run(run), run, items=6)
    (written,) = tmp_path.glob("config_eval/latest/evaluations/*.json")
    assert EvaluationResult.load(written).outcomes == trained.outcomes
    served = Served(recipe, begun, "evaluation.deterministic=false", "--mode", "--token", TOKEN)
    assert "acts by its mode (--mode) at ws://" in served.said
    row = {"states": np.array([0.5, -0.5, 1.0], np.float32)}
    with ActionClient(served.url, TOKEN) as client:
        assert client.metadata["policy"] == file.name  # its directory is nobody's business
        answer = client.infer(row)
    policy = TrainedPolicy(task_of_run(run), run)
    seen = {name: torch.from_numpy(each)[None] for name, each in row.items()}
    expected = policy.build(policy.env_spec()).sample(seen, None).actions[0]
    np.testing.assert_allclose(answer["actions"], expected.numpy(), atol=1e-6)
    served.stop(signal.SIGINT)
    for given, told in (
        ([], "begins with random weights; nearest: model.path=DIRECTORY"),
        ([begun, "--follow"], "--follow: what a recipe begins with does not change"),
    ):
        assert main(["serve", "policy", str(recipe), *given]) == 2
        assert told in capsys.readouterr().err


def test_a_policy_of_another_environment_is_refused(run: Path, served: Served) -> None:
    spec = TrainedPolicy(task_of_run(run), run).env_spec()
    config = RemoteConfig(num_action_chunks=1, url=served.url, token=SecretStr(TOKEN))
    with pytest.raises(ConfigError, match="has chunk 2, the run 1; serve a policy of the same"):
        config.build(spec)


def test_a_newer_checkpoint_is_followed_and_the_end_is_clean(run: Path, served: Served) -> None:
    row = {"states": np.array([0.5, -0.5, 1.0], np.float32)}
    client = ActionClient(served.url, TOKEN)
    before = client.infer(row)
    assert before["version"] == 2
    found = load_checkpoint(run / "checkpoints" / "step_00000002")
    weights = found.tree["workers"]["actor"]["trainer"]
    changed = 0
    for tensor in _tensors(weights):
        if tensor.dtype == torch.float32:
            tensor.mul_(0.5)
            changed += 1
    assert changed
    with CheckpointStore(run / "checkpoints") as store:
        store.save(3, found.tree, metric=1e9, blocking=True)
    deadline = time.monotonic() + 30
    while (after := client.infer(row))["version"] == 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert after["version"] == 3
    trained = TrainedPolicy(task_of_run(run), run)
    assert trained.step == 3
    with torch.inference_mode():
        wanted = trained.build(trained.env_spec()).sample(
            {"states": torch.from_numpy(row["states"])[None].expand(4, 3)}, None
        )  # the recipe has blocks of four rows
    np.testing.assert_array_equal(after["actions"], wanted.actions[0].numpy())
    assert not np.array_equal(after["actions"], before["actions"])
    said = served.stop(signal.SIGTERM)
    assert re.search(r"stopped: \d+ answered, 0 refused", said)
    assert "p50 / p90 / p99: queue" in said
    assert "Traceback" not in said


def test_what_was_looked_at_is_not_read_again(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    trained = TrainedPolicy(task_of_run(copy), copy)
    damaged = copy / "checkpoints" / "step_00000009"
    shutil.copytree(copy / "checkpoints" / f"step_{trained.step:08d}", damaged)
    (damaged / "tree.json").write_text("{")
    for _ in range(3):
        assert trained.newer(trained.step) is None
    assert sum("step_00000009 cannot be used" in each for each in caplog.messages) == 1
    shutil.rmtree(copy / "checkpoints")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="has no checkpoint yet"):
            trained.newer(trained.step)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)


@pytest.mark.slow
def test_a_token_is_made_and_what_a_run_saw_is_asked_of_the_simulator_where_it_is_not_written(
    run: Path,
) -> None:
    trained = TrainedPolicy(task_of_run(run), run)
    written = trained.env_spec()
    (run / "env_spec.json").unlink()
    assert trained.env_spec() == written
    server = Served(run / "checkpoints" / "step_00000002")
    assert server.process.stdout is not None
    token = server.process.stdout.readline().removeprefix("token: ").strip()
    assert len(token) >= 32
    with ActionClient(server.url, token) as client:
        assert client.metadata["version"] == 2
    assert "stopped: 0 answered" in server.stop(signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--token", "x", "--no-token"], "exclude each other"),
        (["--token", "ä"], "printable ASCII"),
        (["--token", "x "], "without a space at its ends"),
        (["--no-token", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["--key", "image"], "--key image: say which entry"),
        (["--key", "a=states", "--key", "a=prompt"], "--key: `a` is `states` and `prompt`; leave"),
        (
            ["--key", "image=main_images"],
            "the policy reads no `main_images`; known: states",
        ),
        (["env.num_envs=2"], "env.num_envs=2 has no effect here; nearest: model.path=PATH"),
        (["--host", "203.0.113.1"], "cannot listen at 203.0.113.1"),
        (["--device", "abacus"], "--device = 'abacus': "),
        (["--device", "meta"], "--device = 'meta': "),
    ],
)
def test_bad_options_are_refused(
    run: Path,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything of the policy is read."""
    monkeypatch.setattr(TrainedPolicy, "__init__", None)
    assert main(["serve", "policy", str(run), "--port", "0", *words]) == 2
    assert told in capsys.readouterr().err


def test_what_is_no_run_of_a_robot_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "policy", str(run / "checkpoints" / "step_00000002"), "--follow"]) == 2
    assert "a checkpoint does not change" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("task: reasoning\n")
    assert main(["serve", "policy", str(tmp_path)]) == 2
    assert "has no policy for actions" in capsys.readouterr().err
