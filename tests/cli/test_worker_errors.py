"""What a worker raises reaches the screen and the exit code as if it were raised here."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main
from tests.runners.support import write_recipe

SWITCHES = """
import gymnasium


class Switches(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.MultiBinary(3)])

    def __init__(self, render_mode=None):
        self.render_mode = render_mode


gymnasium.register("Switches-v0", Switches)
"""

RUNTIMES = ["local", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_user_error_in_a_worker_is_a_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runtime: str
) -> None:
    run = tmp_path / "run"
    recipe = str(write_recipe(tmp_path))
    words = [f"cluster.runtime={runtime}", "env.train.options.id=CartPole-v1"]
    assert main(["train", recipe, "--run-dir", str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model.type: mlp gives continuous actions")
    assert not run.exists()  # nothing of a run that never began is left


def test_a_key_that_an_env_process_refuses_is_one_of_the_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many_switches.py").write_text(SWITCHES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["env.train.options.id=many_switches:Switches-v0"]
    recipe = str(write_recipe(tmp_path))
    assert main(["train", recipe, "--run-dir", str(tmp_path / "run"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: env.train.options.id: the actions of many_switches:Switches-v0")


def test_a_failure_in_a_worker_is_a_message_and_its_trace_is_logged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["actor.optim.lr=1e30", "actor.optim.max_grad_norm=null"]
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words]) == 1
    message, where = capsys.readouterr().err.splitlines()[-2:]
    assert message.startswith("failure: the run failed in actor:0: ")
    assert where == f"whole trace in {run / 'run.log'}"
    assert "Traceback inside actor:0" in (run / "run.log").read_text(encoding="utf-8")
