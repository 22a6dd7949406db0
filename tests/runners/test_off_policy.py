"""Off-policy runs: one program for every placement, synchronous or running ahead, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rlinf.checkpoint.contents import load_checkpoint
from rlinf.cli.main import main
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.workers import replay
from rlinf.workers.config.off_policy import OffPolicyConfig

from . import off_policy_support as support
from . import support as on_policy
from .killing import Task, kill_and_resume
from .off_policy_support import resume, small_config, train
from .support import assert_equal_runs, metrics
from .test_equality import needs_two_cores
from .test_reasoning import StopAfter

TWO = "cluster.cpu_devices_per_node=2"
PLACEMENTS = {
    "disaggregated": "{env: '0', 'rollout,replay,actor': '1'}",
    "hybrid": "{env: '0-1', rollout: '1', replay: '0', actor: '0-1'}",
}
AHEAD = "rollout.max_staleness=1"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ahead"), AHEAD)


def test_training_begins_after_the_random_steps_at_the_wanted_ratio(reference: Path) -> None:
    lines = metrics(reference)
    updates = [line.get("critic/optimizer_steps", 0) for line in lines]
    # 128 transitions a step, 0.05 updates each; the first two rollouts are random.
    assert updates == [0, 0, 7, 6, 7, 6, 6, 7]
    assert [line["replay/transitions"] for line in lines] == [128, 256, 384, 512, *[600] * 4]
    assert "actor/loss" not in lines[1]
    assert lines[-1]["actor/temperature"] < lines[2]["actor/temperature"]
    for name in ("critic", "actor", "temperature"):
        assert lines[-1][f"{name}/optimizer_steps"] == 7
        assert np.isfinite(lines[-1][f"{name}/loss"])


def test_pictures_that_the_policy_does_not_read_are_not_kept(tmp_path: Path) -> None:
    short = ("runner.total_env_steps=384", "evaluation.interval=0")
    runs = [
        train(tmp_path / name, *short, f"env.train.options={{id: 'tests.runners.{module}:{name}'}}")
        for module, name in (("pictures", "Dot-v0"), ("odd_envs", "Seen-v0"))
    ]
    assert_equal_runs(*runs)
    kept, wanted = (load_checkpoint(run / "checkpoints" / "latest").tree for run in runs)
    rows = kept["workers"]["replay"]["rows"]
    assert rows.keys() == wanted["workers"]["replay"]["rows"].keys()
    assert "inputs.states" in rows


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Any, EnvSpec]:
    """A replay worker, and what an environment with a large picture shows."""
    monkeypatch.setattr(replay.StageWorker, "__init__", lambda self: None)
    config = small_config(tmp_path, *overrides)
    shapes = {"main_images": (128, 128, 3), "states": (3,)}
    spec = EnvSpec(shapes, {"main_images": "uint8", "states": "float32"}, "continuous", 2,
                   (-1.0,) * 2, (1.0,) * 2, (), 25)  # fmt: skip
    return replay.ReplayWorker(config, None), spec


def test_a_replay_that_does_not_fit_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, spec = worker(tmp_path, monkeypatch)
    monkeypatch.setattr(replay, "free_memory", lambda: 10_000_000)
    small.start(spec)  # of states alone
    size = replay.transition_bytes(spec, 1)
    assert size == 2 * (128 * 128 * 3 + 12) + 8
    monkeypatch.setattr(type(small._config.model), "unread", lambda self, pictures: ())
    with pytest.raises(ConfigError, match=r"replay\.capacity: 600 .* main_images .* nearest: 128"):
        small.start(spec)  # the run comes to 1024 transitions
    monkeypatch.setattr(replay, "free_memory", lambda: 600 * size)
    small.start(spec)
    default, _ = worker(tmp_path, monkeypatch, "replay.capacity=100000000")
    with pytest.raises(ConfigError, match=r"100000000 transitions .* nearest: 600"):
        default.start(spec)


def test_pictures_of_a_run_that_kept_them_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, spec = worker(tmp_path, monkeypatch)
    resumed.start(spec)
    names = ("main_images", "states", "next.main_images", "next.states")
    resumed.load_state({"rows": {f"inputs.{name}": torch.zeros(4, 2) for name in names}})
    assert resumed.state()["rows"].keys() == {"inputs.states", "inputs.next.states"}


def test_rollouts_under_way_of_a_run_that_kept_pictures_are_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (AHEAD, "runner.total_env_steps=384", "evaluation.interval=0",
             "env.train.options={id: 'tests.runners.pictures:Dot-v0'}")  # fmt: skip
    model = type(small_config(tmp_path).model)
    with monkeypatch.context() as earlier:
        earlier.setattr(model, "unread", lambda self, pictures: ())
        run = train(tmp_path, *words, stop=StopAfter(2))
    begun = load_checkpoint(run / "checkpoints" / "latest")
    assert "main_images" in str(begun.tree["under_way"])
    assert begun.step < 3
    resume(tmp_path, *words)
    rows = load_checkpoint(run / "checkpoints" / "latest").tree["workers"]["replay"]["rows"]
    assert rows["inputs.states"].shape == (384, 2)
    assert not any("main_images" in name for name in rows)


@needs_two_cores
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    stages = 2 if placement == "hybrid" else 1
    place = f"cluster.component_placement={PLACEMENTS[placement]}"
    run = train(tmp_path, TWO, place, f"rollout.pipeline_stage_num={stages}")
    assert_equal_runs(reference, run)


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ray_gives_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    place = f"cluster.component_placement={PLACEMENTS[placement]}"
    assert_equal_runs(reference, train(tmp_path, TWO, place, "cluster.runtime=ray"))


@needs_two_cores
def test_running_ahead_is_the_same_program_anywhere(ahead: Path, tmp_path: Path) -> None:
    place = "cluster.component_placement={'env,rollout': '0', 'replay,actor': '1'}"
    assert_equal_runs(ahead, train(tmp_path, AHEAD, TWO, place))


def test_running_ahead_acts_with_older_weights(reference: Path, ahead: Path) -> None:
    now, before = metrics(reference), metrics(ahead)
    assert [line["env/steps"] for line in now] == [line["env/steps"] for line in before]
    # While actions are random all is equal; then what acts knows of the states a step later.
    same = [one == other for one, other in zip(now, before, strict=True)]
    assert same[:2] == [True] * 2
    assert not same[-1]


@pytest.mark.parametrize("questions", [2, 5])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    reference: Path, ahead: Path, tmp_path: Path, questions: int
) -> None:
    whole, overrides = (ahead, (AHEAD,)) if questions == 5 else (reference, ())
    run = train(tmp_path, *overrides, stop=StopAfter(questions))
    assert len(metrics(run)) < len(metrics(whole))
    resume(tmp_path, *overrides)
    assert_equal_runs(whole, run)


KILLED = Task(
    write_recipe=support.write_recipe,
    overrides=lambda runtime, steps: [
        f"cluster.runtime={runtime}",
        f"runner.total_env_steps={steps * 128}",
        "checkpoint.keep_last=3",
        "checkpoint.keep_best=0",
    ],
    workers=("EnvW", "RolloutW", "ReplayW", "ActorW"),
    pause=0.15,
    compare=assert_equal_runs,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("runtime", "victim"), [("local", "driver"), ("ray", "worker")])
def test_killed_at_random_moments(tmp_path: Path, runtime: str, victim: str) -> None:
    kill_and_resume(KILLED, tmp_path, runtime, kills=3, steps=10, victim=victim)


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_ranks_write_parts_ends_and_is_read_like_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divided = ("actor.type=fsdp", "cluster.runtime=ray", TWO, "runner.total_env_steps=384")
    placed = "cluster.component_placement={'env,rollout,replay': '0', actor: '0-1'}"
    whole = train(tmp_path / "whole", *divided, placed)
    parts = train(tmp_path / "parts", *divided, placed, "checkpoint.layout=sharded")
    assert_equal_runs(whole, parts)
    assert (parts / "checkpoints/latest/actor/.metadata").is_file()
    assert main(["eval", str(parts)]) == 0
    assert "n = 4" in capsys.readouterr().out
    assert main(["convert", "run", str(parts), "--out", str(tmp_path / "policy")]) == 0
    converted = tmp_path / "policy" / "policy.safetensors"
    assert converted.read_bytes() == (parts / "policy.safetensors").read_bytes()
    here = ("local", "{}", "null")
    keys = ("runtime", "component_placement", "cpu_devices_per_node")
    alone = [f"cluster.{key}={value}" for key, value in zip(keys, here, strict=True)]
    assert main(["eval", str(parts), *alone]) == 0
    assert "n = 4" in capsys.readouterr().out
    assert main(["resume", str(parts), *alone, "runner.total_env_steps=512"]) == 0
    assert not (parts / "checkpoints/latest/actor/.metadata").exists()


def test_a_run_is_evaluated_again(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(reference), "--episodes", "4"]) == 0
    assert "n = 4" in capsys.readouterr().out


def test_a_run_is_evaluated_in_another_environment(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = (reference / "env_spec.json").read_bytes()
    shorter = ["env.train.max_episode_steps=9", "evaluation.episodes=5"]
    assert main(["eval", str(reference), *shorter]) == 0
    shown = capsys.readouterr().out
    assert "n = 5" in shown
    result = json.loads(Path(shown.split("written to ")[1].split("\n")[0]).read_text())
    assert [each["episode_len"] for each in result["outcomes"]] == [9] * 5
    assert (reference / "env_spec.json").read_bytes() == described
    # One whose observations the policy cannot read.
    other = ["env.train.options.id=MountainCarContinuous-v0"]
    assert main(["eval", str(reference), *other]) == 2
    assert "the policy was trained on states [" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.type=ppo", "~algorithm.update_to_data"],
            ["algorithm.type", "newest rollout", "nearest: sac"],
        ),
        (
            ["model.type=mlp", "~model.q_hidden_sizes"],
            ["model.type", "no Q functions", "nearest: squashed_mlp"],
        ),
        (["replay.capacity=100"], ["replay.capacity", "128 transitions", "nearest: 128"]),
        (["env.train.auto_reset=false"], ["env.train.auto_reset", "wait", "nearest: true"]),
        (["replay.start_steps=1024"], ["replay.start_steps", "nearest: 896"]),
        (["replay.capcity=9"], ["replay.capcity", "did you mean `capacity`?"]),
        (["algorithm.update_to_data=0"], ["algorithm.update_to_data", "must be > 0"]),
        (
            ["algorithm.update_to_data=0.0009"],
            ["algorithm.update_to_data", "no update for the 768 transitions", "nearest: 0.0014"],
        ),
        (
            ["algorithm.learn_temperature=false", "actor.temperature_optim.lr=0.1"],
            ["actor.temperature_optim", "has no effect without algorithm.learn_temperature: true"],
        ),
        (
            ["actor.critic_optim.value_lr=0.1"],
            ["actor.critic_optim.value_lr", "has no effect without algorithm.type: ppo"],
        ),
        (
            ["actor.gradient_checkpointing=true"],
            ["actor.gradient_checkpointing", "no effect on policies of type squashed_mlp"],
        ),
        (["actor.update_epoch=2"], ["actor.update_epoch", "nearest: 1", "update_to_data"]),
        (["actor.micro_batch_size=10"], ["actor.micro_batch_size", "nearest: 8, 16"]),
        (["algorithm.tau=2"], ["algorithm.tau", "must be <= 1", "nearest: 1"]),
        (
            [TWO, "cluster.component_placement={'env,rollout,replay,actor': '0-1'}"],
            ["cluster.component_placement", "2 replay workers", "replay on one device"],
        ),
    ],
)
def test_bad_inputs_are_refused_with_the_way_out(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        small_config(tmp_path, *overrides)
    for word in words:
        assert word in str(caught.value)


def test_the_recipe_is_accepted_and_says_how_transitions_become_updates() -> None:
    recipe = load_recipe("embodied/drawer_close_sac", [])
    config = validate(OffPolicyConfig, recipe.data, recipe)
    table = dict(config.batch_table())
    assert table["transitions per rollout"] == "16 × 16 = 256"
    random = config.replay.start_steps // config.env_steps_per_rollout
    assert [config.updates(step) for step in (0, random - 1)] == [0, 0]
    ratio = config.updates(random) / config.samples
    assert ratio == config.algorithm.model_dump()["update_to_data"]


def test_sac_has_no_place_in_the_embodied_task() -> None:
    ppo = ("gae_lambda", "value_clip", "normalize_rewards")
    recipe = load_recipe("quickstart", ["algorithm.type=sac", *(f"~algorithm.{k}" for k in ppo)])
    with pytest.raises(ConfigError, match="task: off_policy"):
        validate(EmbodiedConfig, recipe.data, recipe)


def test_it_is_compared_with_a_run_of_another_algorithm_on_the_same_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "off_policy", "runner.total_env_steps=256")
    recipe, other = str(on_policy.write_recipe(tmp_path)), str(tmp_path / "on_policy")
    assert main(["train", recipe, "runner.total_env_steps=256", "--run-dir", other]) == 0
    assert main(["eval", str(run), "--compare", other]) == 0
    assert "mean return (95 % interval" in capsys.readouterr().out
    file = Path(other) / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["evaluation"]["deterministic"] = False
    file.write_text(yaml.safe_dump(config))
    assert main(["eval", str(run), "--compare", other]) == 2
    told = capsys.readouterr()
    assert "run is evaluated by the mode, on_policy by drawn actions, and only" in told.err
    assert "success" not in told.out  # nothing was played
    assert main(["eval", str(run), "--compare", other, "evaluation.deterministic=true"]) == 0
