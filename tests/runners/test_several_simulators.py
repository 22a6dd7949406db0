"""One run in several simulators: every task is counted, any placement is the same, resumed as well,
and what does not go together is refused in a line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.config.explain import explain
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.runners.embodied_config import EmbodiedConfig

from . import off_policy_support, support
from .killing import kill_and_resume
from .off_policy_support import resume, train
from .support import assert_equal_runs, divided, metrics
from .test_equality import needs_two_cores
from .test_reasoning import StopAfter
from .test_resume import EMBODIED

ONE = """
  train:
    type: gymnasium
    options: {id: Pendulum-v1}
    max_episode_steps: 25
    processes: 1
"""
TWO = """
  train:
    - type: gymnasium
      options: {id: Pendulum-v1}
      max_episode_steps: 12
      processes: 1
    - type: gymnasium
      options: {id: Reacher-v5}
      max_episode_steps: 8
      reward_scale: 0.5
      processes: 1
"""
GRPO = ["algorithm.type=grpo", "~algorithm.gamma", "~algorithm.normalize_rewards"]
WAITING = ["env.train.0.auto_reset=false", "env.train.1.auto_reset=false"]
GROUPS = ["env.train.0.group_size=2", "env.train.1.group_size=2"]
PENDULUM, REACHER = "gymnasium Pendulum-v1", "gymnasium Reacher-v5"
PPO = support.SMALL.replace(ONE, TWO)
SAC = off_policy_support.SMALL.replace(ONE, TWO)


def write_recipe(directory: Path) -> Path:
    path = directory / "two.yaml"
    path.write_text(PPO)
    return path


def finished(directory: Path, *overrides: str) -> Path:
    directory.mkdir(exist_ok=True)
    run = directory / "run"
    assert main(["train", str(write_recipe(directory)), *overrides, "--run-dir", str(run)]) == 0
    return run


def config(directory: Path, *overrides: str) -> EmbodiedConfig:
    recipe = load_recipe(str(write_recipe(directory)), list(overrides))
    return validate(EmbodiedConfig, recipe.data, recipe)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("reference"), "rollout.block_size=4")


def test_every_task_is_counted_and_evaluated(reference: Path) -> None:
    lines = metrics(reference)
    seen = {key for line in lines for key in line if key.startswith("env/return/")}
    assert seen == {f"env/return/{PENDULUM}", f"env/return/{REACHER}"}
    result = json.loads(next(reference.glob("evaluations/held_out_step_*.json")).read_text())
    assert {name: each["n"] for name, each in result["summary"]["tasks"].items()} == {
        PENDULUM: 2,
        REACHER: 2,
    }
    assert Counter(each["episode_len"] for each in result["outcomes"]) == {12: 2, 8: 2}


@needs_two_cores
@divided
def test_placements_change_nothing(reference: Path, tmp_path: Path, overrides: list[str]) -> None:
    run = finished(tmp_path, "rollout.block_size=4", *overrides)
    assert_equal_runs(reference, run)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    two = replace(EMBODIED, write_recipe=write_recipe)
    kill_and_resume(two, tmp_path, "local", kills=1, steps=5, victim="driver")


def test_evaluation_of_a_run_by_a_file_and_of_more_episodes(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(reference), "--episodes", "7"]) == 0
    shown = capsys.readouterr().out
    assert f"n = 4)  {PENDULUM}" in shown
    assert f"n = 3)  {REACHER}" in shown
    spec = reference / "evaluations/held_out_spec.json"
    task = json.loads(spec.read_text())["task"]
    assert [(each["horizon"], each["share"]) for each in task["sections"]] == [(12, 1), (8, 1)]
    assert main(["eval", str(reference), "--spec", str(spec)]) == 0
    held_out = json.loads(next(reference.glob("evaluations/held_out_step_*.json")).read_text())
    again = json.loads(
        next(reference.glob(f"evaluations/spec_{held_out['spec_sha256'][:12]}*")).read_text()
    )
    assert again["outcomes"] == held_out["outcomes"]


@pytest.mark.parametrize(
    ("chunk", "steps", "episodes"),
    [
        (1, 24, 4 * 2 + 4 * 3),  # of 12 steps in 4 envs, and of 8 in 4
        (8, 16, 4 * 1 + 4 * 2),  # of 2 chunks, the second cut, and of 1
    ],
)
def test_groups_of_both_are_compared(tmp_path: Path, chunk: int, steps: int, episodes: int) -> None:
    groups = [f"env.train.{place}.group_size=2" for place in (0, 1)]
    rows = 8 * steps // chunk
    grpo = [*GRPO, f"model.num_action_chunks={chunk}", f"rollout.steps={steps}"]
    batches = [f"actor.global_batch_size={rows}", "actor.micro_batch_size=null"]
    shorter = [f"runner.total_env_steps={2 * 8 * steps}"]
    lines = metrics(finished(tmp_path, *groups, *grpo, *batches, *shorter))
    assert [line["rollout/trained_episodes"] for line in lines] == [episodes] * 2


@pytest.mark.slow
def test_off_policy_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_policy_support, "SMALL", SAC)
    whole = train(tmp_path / "whole")
    part = train(tmp_path / "part", stop=StopAfter(5))
    assert len(metrics(part)) < len(metrics(whole))
    resume(tmp_path / "part")
    assert_equal_runs(whole, part)


def test_walked_episodes_are_counted_in_each_section(tmp_path: Path) -> None:
    from rlinf.runners.embodied_evaluation import EpisodeEvaluator

    walked = config(tmp_path, "evaluation.walk=true", "env.train.1.ratio=3")
    spec = EpisodeEvaluator(walked).spec("held_out", 8)
    assert [seed for _, seed in spec.episodes] == [0, 0, 1, 2, 1, 3, 4, 5]
    few = config(
        tmp_path, "evaluation.walk=true", "env.train.1.ratio=3", "evaluation.episodes=8",
        "evaluation.periodic_episodes=4",
    )  # fmt: skip
    spec = EpisodeEvaluator(few).spec("periodic")
    assert [seed for _, seed in spec.episodes] == [2, 6, 7, 8]


def test_keys_of_a_section_are_set_explained_and_checked(tmp_path: Path) -> None:
    changed = config(tmp_path, "env.train.1.ratio=3", "env.train.0.options.id=Swimmer-v5")
    assert [section.ratio for section in changed.env.sections.values()] == [1, 3]
    assert changed.env.sections["env.train.0"].options == {"id": "Swimmer-v5"}
    assert ("env.train.1", "6 environments, gymnasium") in changed.batch_table()
    assert changed.planning.constraints.group_size == 4
    (found,) = explain(EmbodiedConfig, "env.train.1.ratio")
    assert found.key == "env.train.ratio"


REFUSED = [
    (["env.num_envs=7"], ["env.num_envs = 7", "(1 : 1 of the sections)", "nearest: 6, 8"]),
    (["env.train.1.ratio=0.01"], ["env.num_envs = 8", "101 environments", "nearest: 101"]),
    (["env.train.1.ratio=0"], ["env.train.1.ratio = 0 (command line)", "must be > 0"]),
    (["env.train.1.group_size=2"], ["env.train.1.group_size = 2", "nearest: 1"]),
    (["env.train.1.auto_reset=false"], ["env.train.1.auto_reset = false", "nearest: true"]),
    (["env.train.1.max_step=2"], ["env.train.1.max_step", "has no key `max_step`"]),
    (["env.train.1.options.id=Reach-v9"], ["env.train.1.options.id = 'Reach-v9' (command line)"]),
    (["env.train.2.ratio=1"], ["list of 2 sections", "env.train.0.… to env.train.1.…"]),
    (["env.train.ratio=1"], ["list of 2 sections", "env.train.0.… to env.train.1.…"]),
    (["env.train=[]"], ["env.train = []", "lists no section"]),
    (["evaluation.num_envs=3"], ["evaluation.num_envs = 3", "nearest: 2, 4"]),
    (["evaluation.episodes=1"], ["evaluation.episodes = 1", "nearest: 2"]),
    (["env.train.0.max_episode_steps=x"], ["two.yaml", "env.train.0.max_episode_steps = 'x'"]),
    (["env.train.1.options.id=CartPole-v1"], ["env.train.1: ", "discrete actions"]),
    (
        ["env.train={type: gymnasium, options: {id: Pendulum-v1}, max_episode_steps: 9, ratio: 2}"],
        ["env.train.ratio = 2 (command line)", "no other section"],
    ),
    (
        [*GRPO, "env.train.0.group_size=2", "env.train.1.group_size=2"],
        ["rollout.steps = 16", "nearest: 24"],
    ),
    (
        [
            *GRPO,
            "env.train.0.group_size=2",
            "env.train.1.group_size=2",
            "model.num_action_chunks=8",
            "rollout.steps=24",
            "actor.global_batch_size=24",
            "actor.micro_batch_size=null",
        ],
        ["rollout.steps = 24", "up to 12 steps (2 chunks of 8 actions)", "nearest: 16, 32"],
    ),
    (GRPO, ["env.train.0.group_size", "at least 2"]),
    ([*WAITING, "rollout.steps=16"], ["rollout.steps = 16", "up to 12 steps", "nearest: 12, or"]),
    (
        [*GRPO, *WAITING, *GROUPS, "rollout.steps=8"],
        ["rollout.steps = 8", "would cut", "nearest: 12"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[str(each) for each, _ in REFUSED])
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: list[str]
) -> None:
    recipe, run = str(write_recipe(tmp_path)), str(tmp_path / "run")
    assert main(["train", recipe, *overrides, "--run-dir", run]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert "Traceback" not in message


def test_those_that_wait_need_a_rollout_of_the_longest_episode(tmp_path: Path) -> None:
    sizes = ["rollout.steps=12", "actor.global_batch_size=96", "actor.micro_batch_size=null"]
    for algorithm in ([], [*GRPO, *GROUPS]):
        assert config(tmp_path, *WAITING, *sizes, *algorithm).rollout.steps == 12
    longer = load_recipe(str(write_recipe(tmp_path)), [*WAITING, "rollout.steps=16"])
    assert validate(EmbodiedConfig, longer.data, longer, evaluated=True).rollout.steps == 16


@pytest.mark.parametrize("kind", ["record", "behaviour_cloning"])
def test_recorded_episodes_are_of_one_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "record":
        words = ["record", str(write_recipe(tmp_path)), "--out", str(tmp_path / "set")]
    else:
        sections = "env.train=[{type: metaworld, options: {task: reach-v3}, max_episode_steps: 9}"
        words = ["train", "sft/window_open_behaviour_cloning", f"{sections}, {sections[11:]}]"]
    assert main(words) == 2
    assert "env.train" in (message := capsys.readouterr().err)
    assert "recorded episodes are of one" in message


def test_tasks_of_metaworld_with_different_options(tmp_path: Path) -> None:
    """Two real simulators of one kind: goals seen in one, hidden in the other, other limits."""
    sections = """[
        {type: metaworld, options: {task: reach-v3}, max_episode_steps: 10, processes: 1},
        {type: metaworld, options: {task: reach-v3, partially_observable: true},
         max_episode_steps: 15, ratio: 3, processes: 1}]"""
    run = finished(tmp_path, f"env.train={sections}", "runner.total_env_steps=256")
    lines = metrics(run)
    assert len(lines) == 2
    names = {key for line in lines for key in line if key.startswith("env/success/")}
    assert len(names) == 2
    assert all(name.endswith(("(env.train.0)", "(env.train.1)")) for name in names)
