"""``rlinf record`` and ``rlinf check demonstrations``."""

import errno
import itertools
import json
import os
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.cli.main import main
from rlinf.cli.tasks import read_config
from rlinf.data.demonstrations import Demonstration, Demonstrations
from rlinf.data.lerobot.writer import write_lerobot
from rlinf.envs.base import instruction_bytes
from rlinf.errors import ConfigError
from rlinf.runners import record
from rlinf.runners.record import LeRobotFormat, recorded_seeds
from tests.data.lerobot.sets import recorded
from tests.runners.support import write_recipe

SHORT = [
    "env.train.options.task=drawer-close-v3", "env.train.max_episode_steps=20",
    "env.train.processes=1",
]  # fmt: skip


def test_an_expert_is_recorded_and_its_set_checked(tmp_path, capsys):
    out = tmp_path / "set"
    words = ["record", "quickstart", *SHORT, "--out", str(out), "--episodes", "3"]
    assert main([*words, "--num-envs", "2", "--noise", "0.1"]) == 0
    found = Demonstrations.load(out)
    assert len(found.episodes) == 3
    assert found.source["actor"] == "expert"
    assert found.source["env"] == {
        "type": "metaworld", "options": {"task": "drawer-close-v3"}, "horizon": 20,
    }  # fmt: skip
    assert "3 episodes" in capsys.readouterr().out
    main(["check", "demonstrations", str(out)])
    assert "actions [4], observations {'states': (39,)}" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists; give a new directory" in capsys.readouterr().err
    again = tmp_path / "again"
    words[words.index("--out") + 1] = str(again)
    # In ten envs instead of two; nothing is trained, so rollouts may be of any length.
    assert main([*words, "--noise", "0.1", "env.train.auto_reset=false"]) == 0
    np.testing.assert_array_equal(Demonstrations.load(again).actions[:1], found.actions[:1])


@pytest.mark.parametrize("ended", [0, 3])
def test_what_has_ended_is_written_where_a_recording_is_interrupted(
    tmp_path, monkeypatch, capsys, ended
):
    expert_of = record.expert_of

    def interrupted(env):
        def acting(spec):
            act, asked = expert_of(env)(spec), itertools.count(1)

            def acts(observations):
                if next(asked) == 20 * ended + 10:
                    os.kill(os.getpid(), signal.SIGINT)
                return act(observations)

            return acts

        return acting

    monkeypatch.setattr(record, "expert_of", interrupted)
    out = tmp_path / "set"
    words = ["record", "quickstart", *SHORT, "--out", str(out), "--episodes", "6"]
    code = main([*words, "--num-envs", "1"])
    told = capsys.readouterr()
    if ended:
        assert code == 130
        assert "interrupted: 3 of 6 episodes" in told.out
        found = Demonstrations.load(out)
        assert len(found.episodes) == ended
        assert len(found.actions) == 20 * ended
        assert found.source["interrupted"]
    else:
        assert code == 1
        assert "no episode of 6 had ended: nothing is written" in told.err
        assert not out.exists()


@pytest.mark.parametrize("ended", [0, 3])
def test_what_has_ended_is_written_where_a_recording_fails(tmp_path, monkeypatch, capsys, ended):
    expert_of, asked = record.expert_of, itertools.count(1)

    def failing(env):
        act = expert_of(env)(None)

        def acts(observations):
            if next(asked) == 20 * ended + 10:
                raise RuntimeError("the expert lost its way")
            return act(observations)

        return lambda spec: acts

    monkeypatch.setattr(record, "expert_of", failing)
    out = tmp_path / "set"
    words = ["record", "quickstart", *SHORT, "--out", str(out), "--episodes", "6"]
    assert main([*words, "--num-envs", "1"]) == 1
    told = capsys.readouterr().err
    assert "the expert lost its way" in told
    if ended:
        assert f"the 3 of 6 episodes that had ended before the failure are written to {out}" in told
        found = Demonstrations.load(out)
        assert len(found.episodes) == ended
        assert found.source["interrupted"]
    else:
        assert not out.exists()


def test_a_set_that_another_command_has_made_meanwhile_is_left_alone(tmp_path, monkeypatch, capsys):
    expert_of, out = record.expert_of, tmp_path / "set"

    def beside_another(env):
        out.mkdir()
        return expert_of(env)

    monkeypatch.setattr(record, "expert_of", beside_another)
    assert main(["record", "quickstart", *SHORT, "--out", str(out), "--episodes", "1"]) == 0
    assert not list(out.iterdir())
    beside = tmp_path / "set-2"
    assert len(Demonstrations.load(beside).episodes) == 1
    assert f"written to {beside} ({out} has been made meanwhile)" in capsys.readouterr().out


def test_a_recipe_is_meant_where_runs_of_its_name_lie(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    words = ["record", "quickstart", *SHORT, "--out", "set", "--episodes", "1"]
    assert main([*words, "--num-envs", "1"]) == 0
    assert Demonstrations.load(tmp_path / "set").source["actor"] == "expert"


def test_recorded_episodes_are_none_that_are_evaluated():
    _, _, config = read_config("quickstart", ["evaluation.episodes=3000"])
    from rlinf.runners.embodied_evaluation import EpisodeEvaluator

    evaluator = EpisodeEvaluator(config)
    evaluated = {
        seed for purpose in ("periodic", "held_out")
        for _, seed in evaluator.spec(purpose).episodes
    }  # fmt: skip
    seeds = recorded_seeds(config, 2000, seed=0)
    assert len(set(seeds)) == 2000
    assert not evaluated & set(seeds)
    assert seeds[:100] == recorded_seeds(config, 100, seed=0) != recorded_seeds(config, 100, seed=1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reasoning/arithmetic_grpo"], "plays in no simulator"),
        (["quickstart", "env.train.options.partially_observable=true"], "has no expert"),
        (["quickstrat"], "did you mean the recipe `quickstart`"),
        (["quickstrat", "seed=1"], "did you mean the recipe `quickstart`"),
        (["quickstart", "--episodes", "999999999999"], "nearest: 1000000, the most there may be"),
        (["quickstart", "--noise", "inf"], "--noise inf: must be a finite number"),
        (["quickstart", "--noise", "nan"], "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_recorded_is_said(words, told, tmp_path, capsys):
    assert main(["record", *words, "--out", str(tmp_path / "set")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_noise_on_discrete_actions_is_refused_before_any_is_played(tmp_path):
    _, _, config = read_config("embodied/cartpole_ppo", [])
    with pytest.raises(ConfigError, match=r"takes one of 2; nearest: 0"):
        record.record(
            config, tmp_path / "set", actor=pytest.fail, episodes=1, num_envs=1, noise=0.1
        )


@pytest.mark.parametrize("noise", [0.02, 0.3, 0.6])
def test_noise_that_leaves_little_of_an_action_is_said(tmp_path, caplog, noise):
    words = ["env.train.options={id: 'tests.runners.odd_envs:Narrow-v0'}",
             "env.train.max_episode_steps=2", "env.train.processes=1"]  # fmt: skip
    _, _, config = read_config("embodied/pendulum_ppo", words)
    acting = {"episodes": 1, "num_envs": 1, "noise": noise}
    record.record(
        config, tmp_path / "set", actor=lambda spec: lambda seen: np.zeros((1, 1, 2)), **acting
    )
    said = f"--noise {noise:g} is in the units of each action, and leaves little of action 0"
    more = " (and of 1 more)" if noise == 0.6 else ""
    assert caplog.messages == (
        []
        if noise == 0.02
        else [f"{said}, which goes from -0.05 to 0.05{more}; nearest: at most 0.025"]
    )


def test_a_set_without_its_frames_is_not_whole(tmp_path, capsys):
    words = ["record", "quickstart", *SHORT, "--out", str(tmp_path / "set"), "--episodes", "1"]
    assert main(words) == 0
    (tmp_path / "set" / "frames.safetensors").unlink()
    assert main(["check", "demonstrations", str(tmp_path / "set")]) == 2
    assert "frames.safetensors is missing; copy it again" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_set_that_cannot_be_learnt_from_fails_its_check(tmp_path, capsys):
    broken = Demonstration(
        observations={"states": np.full((2, 3), np.nan, np.float32)},
        actions=np.zeros((2, 2), np.float32),
        rewards=np.zeros(2, np.float32),
        seed=0,
        success=False,
    )
    spec = {"observation_shapes": {"states": [3]}, "action_dim": 4, "action_low": [-1, -1],
            "action_high": [1, 1]}  # fmt: skip
    Demonstrations.of([broken], {"spec": spec}).save(tmp_path / "set")
    assert main(["check", "demonstrations", str(tmp_path / "set")]) == 1
    printed = capsys.readouterr().out
    for told in ("the spec has 4", "states hold what is no finite", "no episode succeeded"):
        assert told in printed
    assert main(["check", "demonstrations", str(tmp_path)]) == 2


def test_what_a_set_cannot_be_written_with_is_refused_before_it_is_played(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("rlinf.runners.record.expert_of", lambda env: pytest.fail)
    words = ["record", "quickstart", *SHORT, "--episodes", "2", "--out", str(tmp_path / "set")]
    lerobot = ["--format", "lerobot", "--pictures", "image"]
    assert main([*words, *lerobot, "--fps", "5"]) == 2
    assert "acts 80 times a second; nearest: 80, or leave it out" in capsys.readouterr().err
    for option, value in {"--fps": "80", "--pictures": "image"}.items():
        assert main([*words, option, value]) == 2
        assert "has no effect without --format lerobot" in capsys.readouterr().err
    shown = SimpleNamespace(observation_shapes={"main_depths": (4, 4)}, control_rate=80.0)
    shown.of_present = lambda: shown
    with pytest.raises(ConfigError, match="no place for `main_depths`"):
        LeRobotFormat("image", None).check(shown)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("shape", [(64, 65, 3), (2, 65, 64, 3)])
def test_pictures_that_cannot_be_a_video_are_refused_before_any_is_played(shape):
    pytest.importorskip("av")
    shown = SimpleNamespace(observation_shapes={"main_images": shape}, control_rate=None)
    shown.of_present = lambda: shown
    with pytest.raises(ConfigError, match=r"cannot be a video.*nearest: --pictures image"):
        LeRobotFormat("video", None).check(shown)
    LeRobotFormat("image", None).check(shown)


def full(path, data):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_lerobot_set_is_recorded_shown_and_measured(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pyarrow")
    from rlinf.data.lerobot.reader import LeRobotSet
    from rlinf.models.vla.statistics_files import read_statistics

    sets = {kind: tmp_path / kind for kind in ("rlinf", "lerobot")}
    words = ["record", "quickstart", *SHORT, "--episodes", "2", "--num-envs", "2"]
    for kind, out in sets.items():
        pictures = ["--pictures", "image"] if kind == "lerobot" else []
        assert main([*words, "--format", kind, *pictures, "--out", str(out)]) == 0
    ours, theirs = Demonstrations.load(sets["rlinf"]), LeRobotSet(sets["lerobot"])
    assert theirs.fps == 80
    assert theirs.tasks == ("drawer close",)
    np.testing.assert_array_equal(theirs.vectors("action"), ours.actions)
    states = theirs.vectors("observation.state")
    np.testing.assert_array_equal(states, ours.observations["states"])
    assert theirs.success == tuple(each.success for each in ours.episodes)
    for out in sets.values():
        assert main(["data", "show", str(out)]) == 0
        assert "2 episodes" in capsys.readouterr().out
        assert main(["data", "stats", str(out), "--out", str(out.with_suffix(".json"))]) == 0
        found = read_statistics(out.with_suffix(".json"))
        wanted = np.quantile(ours.actions, 0.99, axis=0)
        np.testing.assert_allclose(found.actions.q99, wanted, rtol=1e-5)
        assert found.states.dim == 39
        file = str(tmp_path / f"{out.name}-deltas.json")
        deltas = ["data", "stats", str(out), "--deltas", "0, 2", "--out", file]
        assert main([*deltas, "--horizon", "1"]) == 0
        moved = ours.actions - ours.observations["states"][:, :4] * [1, 0, 1, 0]
        found = read_statistics(tmp_path / f"{out.name}-deltas.json")
        np.testing.assert_allclose(found.actions.q99, np.quantile(moved, 0.99, axis=0), rtol=1e-4)
        assert main(deltas) == 2
        assert "--deltas and --horizon go together" in capsys.readouterr().err
        assert main([*deltas, "--horizon", "1000000000000"]) == 2
        assert "--horizon" in capsys.readouterr().err
        assert main([*deltas[:4], "4", "--horizon", "1"]) == 2
        assert "dimension 4; " in capsys.readouterr().err
        assert main([*deltas[:4], "first", "--horizon", "1"]) == 2
        assert "must be whole numbers from 0, such as 0,1,2" in capsys.readouterr().err
        # It replaces what it wrote, whole or not at all, and nothing else.
        before = out.with_suffix(".json").read_bytes()
        with monkeypatch.context() as disk:
            disk.setattr("rlinf.checkpoint.files.write_durable", full)
            assert main(["data", "stats", str(out), "--out", str(out.with_suffix(".json"))]) == 1
        assert out.with_suffix(".json").read_bytes() == before
        assert main(["data", "stats", str(out), "--out", str(out.with_suffix(".json"))]) == 0
        kept = next(each for each in out.rglob("*.json"))
        before = kept.read_bytes()
        capsys.readouterr()
        assert main(["data", "stats", str(out), "--out", str(kept)]) == 2
        assert "exists and is something else; give a new file" in capsys.readouterr().err
        assert kept.read_bytes() == before
    assert main(["data", "show", str(tmp_path)]) == 2


def test_features_of_other_names_are_measured_where_they_are_named(tmp_path, capsys):
    """Otherwise statistics of nothing were written, and said to be ready."""
    pytest.importorskip("pyarrow")
    recorded().save(tmp_path / "ours")
    write_lerobot(recorded(), tmp_path / "set", fps=20, pictures="image")
    names = {"action": "act", "observation.state": "joints"}
    for path in [*tmp_path.glob("set/data/*/*.parquet"), tmp_path / "set/meta/info.json"]:
        rename(path, names)
    out = tmp_path / "norm_stats.json"
    words = ["data", "stats", str(tmp_path / "set"), "--out", str(out)]
    assert main(words) == 2
    assert "--actions" in (said := capsys.readouterr().err)
    assert "has no feature `action`; did you mean `act`?" in " ".join(said.split())
    assert not out.exists()
    assert main([*words, "--actions", "act", "--state", "joint"]) == 2
    assert "--state" in (said := capsys.readouterr().err)
    assert "did you mean `joints`?" in " ".join(said.split())
    assert main([*words, "--actions", "act", "--state", "joints"]) == 0
    assert json.loads(out.read_text())["norm_stats"].keys() == {"actions", "state"}
    assert main(["data", "stats", str(tmp_path / "ours"), "--state", "joints"]) == 2
    assert "--state: names a feature of a LeRobot set" in capsys.readouterr().err


def rename(path, names):
    """Features in a file of a LeRobot set."""
    from pyarrow import parquet

    if path.suffix == ".json":
        info = json.loads(path.read_text())
        info["features"] = {names.get(k, k): each for k, each in info["features"].items()}
        path.write_text(json.dumps(info))
        return
    table = parquet.read_table(path)
    parquet.write_table(table.rename_columns([names.get(n, n) for n in table.column_names]), path)


def test_every_task_of_an_episode_is_shown(tmp_path, capsys):
    told = ["go left"] * 3 + ["go right"] * 2
    episode = Demonstration(
        observations={"instruction": np.stack([instruction_bytes(text) for text in told])},
        actions=np.zeros((5, 2), np.float32),
        rewards=np.zeros(5, np.float32),
        seed=0,
        success=True,
    )
    found = Demonstrations.of([episode, episode], {"spec": {}})
    found.save(tmp_path / "rlinf")
    pytest.importorskip("pyarrow")
    write_lerobot(found, tmp_path / "lerobot", fps=10, pictures="image")
    for kind in ("rlinf", "lerobot"):
        assert main(["data", "show", str(tmp_path / kind)]) == 0
        printed = capsys.readouterr().out
        assert re.search(r"go left\W+2\b", printed), printed
        assert re.search(r"go right\W+2\b", printed), printed


def test_what_a_recipe_imitates_need_not_be_there_yet(tmp_path, capsys):
    out = tmp_path / "set"
    words = ["record", "sft/window_open_behaviour_cloning", "--out", str(out), "--episodes", "1"]
    assert main([*words, "--num-envs", "1", "env.train.max_episode_steps=20"]) == 0
    assert Demonstrations.load(out).source["actor"] == "expert"


def test_a_trained_policy_is_recorded_with_pictures_that_it_does_not_see(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "set"
    train = ["train", "quickstart", *SHORT, "--run-dir", str(run), "env.num_envs=2",
             "rollout.steps=4", "runner.total_env_steps=8", "actor.global_batch_size=8",
             "evaluation.interval=0", "evaluation.episodes=2", "evaluation.num_envs=2",
             "evaluation.video_episodes=0", "evaluation.stop_at_success=null"]  # fmt: skip
    assert main(train) == 0
    words = ["record", str(run), "--out", str(out), "--episodes", "2"]
    pictures = ["env.train.options.images=true", "env.train.options.image_size=64"]
    assert main([*words, *pictures]) == 0
    found = Demonstrations.load(out)
    assert found.source["actor"] == "run step 1"
    assert found.observations["states"].shape[1:] == (39,)
    assert found.observations["main_images"].shape[1:] == (64, 64, 3)
    for number in range(2):
        words[words.index("--out") + 1] = str(tmp_path / f"drawn_{number}")
        assert main([*words, *pictures, "evaluation.deterministic=false"]) == 0
    drawn = [Demonstrations.load(tmp_path / f"drawn_{number}") for number in range(2)]
    assert drawn[0].source["actor"] == "run step 1, by drawn actions"
    assert np.array_equal(drawn[0].actions, drawn[1].actions)
    assert not np.array_equal(drawn[0].actions, found.actions)
    capsys.readouterr()
    words[words.index("--out") + 1] = str(tmp_path / "other")
    assert main([*words, "model.hidden_sizes=[8]"]) == 2
    assert "a recorded run keeps what it trains; not changeable" in capsys.readouterr().err
    assert main([*words, "env.train.options.task=MT10"]) == 2
    assert "the policy was trained on states [39] (1 tasks)" in capsys.readouterr().err


def test_who_records_or_converts_a_run_is_warned_of_files_that_changed(
    tmp_path, monkeypatch, capsys
):
    """In a line that says so, as an evaluation of it does."""
    file = tmp_path / "own_dot_env.py"
    file.write_text(
        "import gymnasium\nfrom tests.runners.pictures import Dot\n"
        "gymnasium.register('OwnDot-v0', entry_point=Dot)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    words = ["env.train.options={id: 'own_dot_env:OwnDot-v0'}", "runner.total_env_steps=64",
             "evaluation.interval=0"]  # fmt: skip
    assert main(["train", str(write_recipe(tmp_path)), "--run-dir", str(run), *words]) == 0
    file.write_text(file.read_text() + "# by another hand\n")
    told = f"warning: env.train.module own_dot_env: {file} is not what the run began with"
    recorded = ["record", str(run), "--episodes", "2", "--num-envs", "2"]
    for command in (recorded, ["convert", "run", str(run)]):
        capsys.readouterr()
        assert main([*command, "--out", str(tmp_path / command[0])]) == 0
        assert capsys.readouterr().err.splitlines().count(told) == 1
