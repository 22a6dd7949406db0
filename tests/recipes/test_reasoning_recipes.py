"""Recipes of published runs: accepted without the cluster that they are for, with the values of
the publication."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.algorithms.config import PPOConfig
from rlinf.config.load import load_recipe, recipe_names
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.trainers.config import OptimizerConfig

from .conftest import rlinf

# Nodes, devices and engines; longest sequence, answers per prompt, prompts, optimizer steps; tensor
# parallelism of actor and engine; rates of actor and critic.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "math_1.5b_grpo": (16, 128, 128, 28672, 16, 512, 4, 2, 1, 2e-5, None),
    "math_1.5b_grpo_pipeline": (8, 32, 32, 28672, 16, 512, 4, 2, 1, 2e-5, None),
    "math_1.5b_grpo_one_node": (1, 4, 4, 28672, 16, 512, 4, 2, 1, 2e-5, None),
    "math_1.5b_grpo_is": (16, 128, 128, 28672, 16, 512, 4, 2, 1, 2e-5, None),
    "math_1.5b_reinforce_pp": (16, 128, 128, 28672, 16, 512, 4, 2, 1, 2e-5, None),
    "math_1.5b_ppo": (1, 8, 8, 12288, 1, 256, 1, 1, 1, 1e-6, 1e-5),
    "math_1.5b_grpo_single_gpu": (1, 1, 1, 2048, 2, 128, 4, 1, 1, 2e-5, None),
    "math_7b_grpo": (16, 128, 64, 28672, 32, 512, 4, 4, 2, 2e-5, None),
    "math_32b_grpo": (32, 256, 64, 28672, 32, 512, 4, 8, 4, 2e-5, None),
    "math_30b_a3b_grpo": (16, 128, 32, 28672, 16, 512, 4, 1, 4, 2e-6, None),
    "math_moonlight_16b_grpo": (1, 8, 1, 8192, 8, 128, 4, 1, 8, 1e-6, None),
}
# β₂, ε, weight decay and clipping of the actor's optimizer, and of the critic's.
OF_1_5B = (0.95, 1e-5, 0.05, 0.8)
OF_PPO = (0.999, 1e-8, 0.01, 1.0)
OPTIMIZERS = dict.fromkeys(PUBLISHED, OF_1_5B) | {
    "math_1.5b_ppo": OF_PPO,
    "math_7b_grpo": (0.95, 1e-5, 0.05, 1.0),
    "math_32b_grpo": (0.95, 1e-5, 0.05, 1.0),
    "math_30b_a3b_grpo": (0.95, 1e-15, 0.01, 1.0),
    "math_moonlight_16b_grpo": (0.98, 1e-8, 0.1, 1.0),
}
# Longest prompt, where it is not 1024; tokens or sequences of a micro batch.
PROMPTS = {"math_1.5b_ppo": 512, "math_moonlight_16b_grpo": 4096}
PACKED = {"math_1.5b_ppo": 12288, "math_moonlight_16b_grpo": 8192}
# Those that scale the loss of a micro batch by its tokens, or pack it; in the others, whose micro
# batches are of one sequence, the mean over tokens is one over sequences.
MEANS_OF_TOKENS = {
    "math_1.5b_grpo_pipeline", "math_1.5b_grpo_one_node", "math_7b_grpo", "math_32b_grpo", *PACKED,
}  # fmt: skip
UNSHUFFLED = {
    "math_1.5b_grpo", "math_1.5b_grpo_is", "math_1.5b_grpo_pipeline", "math_1.5b_grpo_one_node",
    "math_1.5b_grpo_single_gpu", "math_1.5b_reinforce_pp", "math_1.5b_ppo", "math_30b_a3b_grpo",
}  # fmt: skip
PIPELINES = ("math_1.5b_grpo_pipeline", "math_1.5b_grpo_one_node")
NAMES = [name for name in recipe_names() if name.startswith("reasoning/math_")]


def optimizer(section: OptimizerConfig) -> tuple[float, float, float, float | None]:
    assert section.beta1 == 0.9
    return section.beta2, section.eps, section.weight_decay, section.max_grad_norm


def architecture(name: str) -> str:
    if "moonlight" in name:
        return "deepseek_v3"
    return "qwen3_moe" if "a3b" in name else "qwen2"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"What is {n}+1?", "solutions": [f"{n + 1}"]} for n in range(20)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_every_recipe_is_looked_at() -> None:
    assert {f"reasoning/{name}" for name in PUBLISHED} == set(NAMES)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("vllm_is_installed")
def test_a_dry_run_needs_no_cluster(
    name: str,
    models: Callable[[str], Path],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(models(architecture(name)), tmp_path / "model")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}  # that the ranks may share
    settings = json.loads((model / "config.json").read_text()) | heads
    (model / "config.json").write_text(json.dumps(settings))
    code, shown, error = rlinf(
        capsys,
        "train",
        f"reasoning/{name}",
        "--dry-run",
        f"model.path={model}",
        f"data.files.train=[{prompts}]",
        f"runner.output_dir={tmp_path}",
    )
    assert code == 0, error
    assert "nothing was started" in shown


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_those_of_the_publication(name: str) -> None:
    recipe = load_recipe(f"reasoning/{name}")
    config = validate(ReasoningConfig, recipe.data, recipe)
    rollout, actor, algorithm = config.rollout, config.actor, config.algorithm
    engine: Any = rollout.engine
    found = (
        config.cluster.num_nodes,
        len(config.plan.components["actor"].devices),
        config.world_size("rollout"),
        config.data.max_prompt_length + rollout.sampling.max_new_tokens,
        rollout.group_size,
        rollout.prompts,
        actor.n_minibatches,
        actor.tensor_parallel_size,
        engine.tensor_parallel_size,
        actor.optim.lr,
        None if config.critic is None else config.critic.optim.lr,
    )
    assert found == PUBLISHED[name]
    assert engine.max_model_len == found[3]
    assert engine.max_running_requests == 64
    assert config.data.max_prompt_length == PROMPTS.get(name, 1024)
    assert rollout.sampling.temperature == 1.0
    assert optimizer(actor.optim) == OPTIMIZERS[name]
    assert (actor.lr_sched.type, actor.shuffle) == ("constant", name not in UNSHUFFLED)
    assert actor.max_tokens_per_micro_batch == PACKED.get(name)
    assert actor.micro_batch_size == (None if name in PACKED else 1)
    moonlight = "moonlight" in name
    assert algorithm.clip_ratio_low == 0.2
    assert algorithm.clip_ratio_high == (0.28 if moonlight else 0.2)
    assert (algorithm.entropy_bonus, algorithm.kl_beta) == (0, 0)
    assert algorithm.early_stop_imp_ratio == (None if moonlight else 5.0)
    mean = "token-mean" if name in MEANS_OF_TOKENS else "seq-mean-token-mean"
    assert algorithm.loss_agg_func == mean
    assert algorithm.normalize_advantages == (name not in PIPELINES)
    (reward,) = config.reward.functions.values()
    section: Any = reward
    assert (section.max_value * section.scale, section.min_value * section.scale) == (5.0, -5.0)


def test_values_of_one_algorithm_alone_are_those_of_the_publication() -> None:
    recipe = load_recipe("reasoning/math_1.5b_reinforce_pp")
    config = validate(ReasoningConfig, recipe.data, recipe)
    assert (config.algorithm.kl_reward_beta, config.algorithm.kl_reward_type) == (0.001, "k2")
    recipe = load_recipe("reasoning/math_1.5b_ppo")
    config = validate(ReasoningConfig, recipe.data, recipe)
    algorithm, critic = config.algorithm, config.critic
    assert isinstance(algorithm, PPOConfig)
    assert critic is not None
    credit = algorithm.gamma, algorithm.gae_lambda, algorithm.value_clip, algorithm.huber_delta
    assert credit == (1.0, 1.0, 0.5, 1e4)
    assert (optimizer(critic.optim), critic.max_tokens_per_micro_batch) == (OF_PPO, 12288)
    steps = config.runner.total_steps
    assert (steps, critic.lr_sched.factor(steps, steps)) == (1650, 0.0)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_trains_while_it_generates(name: str) -> None:
    recipe = load_recipe(f"reasoning/{name}")
    config = validate(ReasoningConfig, recipe.data, recipe)
    devices = {part: set(config.plan.components[part].devices) for part in ("rollout", "actor")}
    assert not devices["rollout"] & devices["actor"]
    assert config.actor.trains_in_order
    assert config.algorithm.prepares_parts


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_says_what_it_is_and_that_it_was_not_run(name: str) -> None:
    lines = Path("recipes/reasoning", f"{name}.yaml").read_text().splitlines()
    comment = [line for line in lines[:5] if line.startswith("#")]
    assert 2 <= len(comment) <= 4
    assert "Not run" in " ".join(comment)


def test_the_recipe_that_trains_here_takes_a_model_and_prompts(
    models: Callable[[str], Path], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (
        f"model.path={models('qwen2')}", "model.architecture=null", "warm_start=null",
        "data.task=null", f"data.files={{train: [{prompts}]}}", "data.max_prompt_length=512",
        "validation.val_check_interval=0",
    )  # fmt: skip
    code, shown, error = rlinf(capsys, "train", "reasoning/arithmetic_grpo", "--dry-run", *own)
    assert code == 0, error
    assert "nothing was started" in shown


@pytest.mark.usefixtures("vllm_is_installed")
def test_without_a_model_the_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = rlinf(capsys, "train", "reasoning/math_7b_grpo", "--dry-run")
    assert code == 2
    assert "data.files" in error or "model.path" in error


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster.accelerators_per_node=4"], "there are 64 resources"),
        (["cluster.num_nodes=15"], "there are 120 resources"),
        (["cluster.cpu_devices_per_node=2"], "exclude each other"),
        (["cluster.accelerators_per_node=0"], "must be >= 1"),
        (["actor.tensor_parallel_size=3"], "does not divide 128 ranks"),
        (["rollout.prompts=500"], "does not divide over 64 rollout workers"),
    ],
)
def test_what_does_not_fit_the_stated_cluster_is_refused(overrides: list[str], reason: str) -> None:
    recipe = load_recipe("reasoning/math_7b_grpo", overrides)
    with pytest.raises(ConfigError, match=reason):
        validate(ReasoningConfig, recipe.data, recipe)


def test_a_cluster_of_other_nodes_is_refused_when_it_is_found() -> None:
    recipe = load_recipe("reasoning/math_7b_grpo")
    config = validate(ReasoningConfig, recipe.data, recipe)
    config.check_nodes([8] * 16)
    with pytest.raises(ConfigError, match="accelerators_per_node: is 8, but node 3 has 4"):
        config.check_nodes([8, 8, 8, 4])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["math_1.5b_grpo_single_gpu", "math_1.5b_ppo", "math_1.5b_reinforce_pp", "math_1.5b_grpo_is",
     "math_30b_a3b_grpo", "math_moonlight_16b_grpo"],
)  # fmt: skip
def test_a_recipe_runs_with_a_tiny_model(
    name: str,
    models: Callable[[str], Path],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one CPU, without vLLM: what remains of the recipe is its algorithm and its trainer."""
    changes = [
        f"model.path={models(architecture(name))}",
        f"data.files.train=[{prompts}]",
        f"runner.output_dir={tmp_path}",
        "runner.total_steps=2",
        "~rollout.engine",
        "rollout.engine={type: hf}",
        "rollout.prompts=4",
        "rollout.sampling.max_new_tokens=6",
        "actor.tensor_parallel_size=1",
        "model.dtype=float32",
        "actor.precision.param=float32",
        "reward.processes=1",
    ]
    if "single" not in name:
        changes.append("~cluster")
    if "ppo" in name:
        changes.append("critic.precision.param=float32")
    code, shown, error = rlinf(capsys, "train", f"reasoning/{name}", *changes)
    assert code == 0, error
    assert "training: 20 prompts of 20 records" in shown
    assert "model:" in shown


def test_the_recipe_with_pictures_is_accepted_with_the_values_of_the_publication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.vision import write_model

    name = "reasoning/geo3k_qwen3_vl_2b_grpo"
    model = write_model("qwen3_vl", tmp_path).path
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a?", "answer": "1", "images": "a.png"}\n')
    own = (f"model.path={model}", f"data.files.train=[{tmp_path}/prompts.jsonl]")
    code, shown, error = rlinf(capsys, "train", name, "--dry-run", *own)
    assert code == 0, error
    assert "nothing was started" in shown
    recipe = load_recipe(name)
    config = validate(ReasoningConfig, recipe.data, recipe)
    rollout, actor, algorithm = config.rollout, config.actor, config.algorithm
    assert (config.cluster.num_nodes, config.world_size("actor")) == (1, 8)
    assert (config.data.max_prompt_length, rollout.sampling.max_new_tokens) == (4096, 4096)
    assert (rollout.group_size, rollout.prompts, actor.n_minibatches) == (8, 64, 1)
    assert (actor.optim.lr, algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (
        1e-6,
        0.2,
        0.28,
    )
    assert optimizer(actor.optim) == (0.98, 1e-8, 0.1, 1.0)
    assert (actor.max_tokens_per_micro_batch, actor.lr_sched.type) == (8192, "constant")
    assert (algorithm.loss_agg_func, algorithm.importance_sampling_clip) == (
        "seq-mean-token-mean",
        2.0,
    )
    assert "Not run" in Path("recipes", f"{name}.yaml").read_text()
