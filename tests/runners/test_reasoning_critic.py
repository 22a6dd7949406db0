"""PPO with a critic of its own: the same under any placement, after a resume; it learns."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import UserError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.run import Run
from rlinf.scheduler.cpu_slots import available_cores

from .reasoning_support import assert_equal_runs, small_config, train, untimed

CRITIC = "critic={n_minibatches: 2, optim: {lr: 1.0e-3}}"
PPO = ("algorithm={type: ppo, critic_warmup_steps: 1}", CRITIC)
WITH_KL = ("algorithm={type: ppo, kl_reward_beta: 0.02, proximal: recomputed}", CRITIC)
PLACEMENTS = {
    "together": "{'rollout,reward': '0', 'actor,critic': '1'}",
    "critic beside the engine": "{'rollout,reward,critic': '0', actor: '1'}",
}

needs_two_cores = pytest.mark.skipif(
    len(available_cores()) < 2, reason="two CPU slots need two cores"
)


def nodes(config: ReasoningConfig) -> list[str]:
    return [node.name for node in Reasoning.flow(config).order()]


def test_the_flow_has_the_stages_that_the_algorithm_needs(tmp_path: Path) -> None:
    assert nodes(small_config(tmp_path)) == ["rollout", "train"]
    assert nodes(small_config(tmp_path, *PPO)) == ["rollout", "critic", "train"]
    assert nodes(small_config(tmp_path, *WITH_KL)) == ["rollout", "inference", "critic", "train"]


def test_the_critic_is_placed_like_the_others(tmp_path: Path) -> None:
    config = small_config(tmp_path, *PPO)
    assert config.components == ("rollout", "reward", "actor", "critic")
    assert [row[0] for row in config.placement_table()[1:]] == list(config.components)
    with pytest.raises(UserError, match="does not place critic"):
        small_config(tmp_path, *PPO, "cluster.component_placement={'rollout,reward,actor': '0'}")
    with pytest.raises(UserError, match="2 critic ranks, which need a process each"):
        small_config(
            tmp_path,
            *PPO,
            "cluster.cpu_devices_per_node=2",
            "cluster.component_placement={'rollout,reward,actor': '0', critic: '0-1'}",
        )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("reference"), *PPO, "runner.total_steps=3")


def test_the_critic_learns_alone_at_first(reference: Path) -> None:
    first, *others = [x for x in untimed(reference) if "actor/optimizer_steps" in x]
    assert first["actor/optimizer_steps"] == 0
    assert first["critic/optimizer_steps"] == 2
    assert all(line["actor/optimizer_steps"] == 2 for line in others)
    assert all(line["critic/value_loss"] >= 0 for line in others)


@needs_two_cores
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    run = train(
        tmp_path,
        *PPO,
        "runner.total_steps=3",
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS[placement]}",
    )
    assert_equal_runs(reference, run)


@needs_two_cores
@pytest.mark.slow
def test_ray_gives_the_same_as_local(reference: Path, tmp_path: Path) -> None:
    run = train(
        tmp_path,
        *PPO,
        "runner.total_steps=3",
        "cluster.runtime=ray",
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS['critic beside the engine']}",
    )
    assert_equal_runs(reference, run)


@needs_two_cores
def test_penalties_of_the_reference_reach_the_critic(tmp_path: Path) -> None:
    more = (*WITH_KL, "runner.total_steps=2")
    one = train(tmp_path / "one", *more)
    told = [line["rollout/reference_kl"] for line in untimed(one) if "actor/loss" in line]
    assert told[0] == pytest.approx(0, abs=1e-6)
    assert abs(told[1]) > 1e-6
    other = train(
        tmp_path / "other",
        *more,
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS['critic beside the engine']}",
    )
    assert_equal_runs(one, other)


def test_resumed(reference: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *PPO, "runner.total_steps=2")
    with RunDirectory.open(run) as directory:
        config = small_config(tmp_path, *PPO, "runner.total_steps=3")
        Run(Reasoning, config, directory, threading.Event()).run(resume=True)
    assert_equal_runs(reference, run)


def test_a_critic_with_a_model_of_its_own(reference: Path, tmp_path: Path) -> None:
    model = reference / "initial_model"
    own = f"critic={{n_minibatches: 2, optim: {{lr: 1.0e-3}}, model: {{path: {model}}}}}"
    run = train(tmp_path / "same", PPO[0], own, "runner.total_steps=3")
    assert_equal_runs(reference, run)
    smaller = own.replace(
        f"{{path: {model}}}",
        f"{{path: {model}, architecture: {{hidden_size: 16, layers: 1, heads: 2, kv_heads: 1,"
        " intermediate_size: 16}}",
    )
    run = train(tmp_path / "smaller", PPO[0], smaller, "runner.total_steps=2")
    assert untimed(run)[1]["critic/value_loss"] != untimed(reference)[1]["critic/value_loss"]


def test_a_missing_model_of_the_critic_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, PPO[0], "critic={model: {path: /nowhere/critic}}")
    with pytest.raises(UserError, match="/nowhere/critic") as refused:
        config.check()
    assert "critic.model" in str(refused.value)


SHORT = [
    "data.task={levels: [1], size: 140, held_out: 10}",
    "model.architecture={hidden_size: 64, layers: 2, heads: 2, kv_heads: 1}",
    "warm_start={steps: 80, batch_size: 64, optim: {lr: 3.0e-3}, lr_sched: {warmup_steps: 10}}",
    "rollout={prompts: 64, group_size: 4}",
    "algorithm={type: ppo, gamma: 1.0, gae_lambda: 1.0, critic_warmup_steps: 2}",
    "critic={n_minibatches: 4, optim: {lr: 1.0e-3}}",
    "actor={n_minibatches: 4, optim: {lr: 7.0e-4}}",
    "runner.total_steps=60",
    "validation={prompts: 10, val_check_interval: 0}",
]


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    recipe = load_recipe("reasoning/arithmetic_grpo", SHORT)
    config = validate(ReasoningConfig, recipe.data, recipe)
    with RunDirectory.create(tmp_path, "learns", path=tmp_path / "run") as run:
        Run(Reasoning, config, run, threading.Event()).run()
    lines = [line for line in untimed(run.path) if "rollout/rewards" in line]
    rewards = [line["rollout/rewards"] for line in lines]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    explained = [line["critic/explained_variance"] for line in lines]
    assert sum(explained[-10:]) > sum(explained[:10])
