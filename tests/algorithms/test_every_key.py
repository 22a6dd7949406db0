"""A key of an algorithm that would have no effect is refused; every other one has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlinf.algorithms.base_config import ALGORITHMS, REGISTRY, AlgorithmConfig
from rlinf.algorithms.protocol import Algorithm, Scores
from rlinf.algorithms.sac import SAC
from tests.algorithms.batches import random_batch
from tests.algorithms.rollouts import flags, random_trajectory
from tests.algorithms.test_families import ChunkEvaluation
from tests.algorithms.test_sac import drawn, networks

OTHER: dict[str, list[Any]] = {
    "adv_clip_max": [0.3],
    "advantage": ["raw", "gae"],
    "agg_q": ["min", "mean"],
    "backup_entropy": [True, False],
    "behave_weight_threshold": [1.01],
    "beta": [0.5],
    "bootstrap_type": ["always", "none"],
    "clip_log_ratio_max": [0.25],
    "clip_log_ratio_min": [-0.25],
    "clip_ratio_c": [1.21],
    "clip_ratio_high": [0.3],
    "clip_ratio_low": [0.1],
    "critic_warmup_steps": [3],
    "dpo_beta": [0.5],
    "dynamic_sampling": [True, False],
    "early_stop_imp_ratio": [1.5],
    "entropy_bonus": [0.2],
    "entropy_type": ["token_level"],
    "filter_rewards": [True, False],
    "gae_lambda": [0.5],
    "gamma": [0.7],
    "group_baseline": [True, False],
    "huber_delta": [0.1],
    "importance_sampling": ["sequence", None],
    "importance_sampling_clip": [1.1],
    "importance_sampling_min": [0.9],
    "importance_sampling_mode": ["mask"],
    "initial_temperature": [0.5],
    "kl_beta": [0.2],
    "kl_penalty_type": ["k2"],
    "kl_reward_beta": [0.2],
    "kl_reward_type": ["k2"],
    "learn_temperature": [True, False],
    "len_reward_penalty": [0.5],
    "level": ["chunk_level"],
    "logprob_type": ["action_level"],
    "loss_agg_func": ["token-mean", "seq-mean-token-mean"],
    "loss_agg_length": [7],
    "loss_form": ["mse", "dpo"],
    "max_drift": [0.01],
    "max_length": [5],
    "max_resample": [9],
    "normalize_advantages": [True, False],
    "normalize_rewards": [True, False],
    "overlong_filter": [True, False],
    "per_token": [True],
    "proximal": ["recomputed", "interpolated"],
    "reward_clip": [0.01],
    "reward_type": ["action_level"],
    "rewards_lower_bound": [29.0],
    "rewards_upper_bound": [-29.0],
    "safe_length": [1],
    "target_entropy": [-1.5],
    "target_space": ["xnext"],
    "tau": [0.5],
    "teacher": [Path("other.safetensors")],
    "update_to_data": [2.0],
    "value_clip": [0.1],
    "value_coefficient": [0.5],
    "weight_by_episode_length": [True, False],
    "weight_mode": ["constant"],
    "weight_scale": [(1.0, 0.5)],
    "xcur_source": ["rollout"],
}
"""Other values of every key of any algorithm."""

ELSEWHERE = {
    "max_resample": "rlinf/runners/reasoning.py",
    "update_to_data": "rlinf/workers/config/off_policy.py",
}
"""Keys that whoever collects or draws reads, and no algorithm; and where."""


def equal_by_nature(config: AlgorithmConfig, key: str) -> bool:
    """Where all values of a key are known to say the same."""
    if key == "per_token":  # all tokens of a sequence have one advantage and weight
        return config.type == "gspo"
    # Sums of a row's entropies.
    return key == "entropy_type" and "seq-mean-token-sum" in getattr(config, "loss_agg_func", "")


FILTER = {"filter_rewards": True, "rewards_lower_bound": -30.0, "rewards_upper_bound": 30.0}
TOKENS = {
    "kl_beta": 0.1, "kl_reward_beta": 0.1, "proximal": "recomputed",
    "importance_sampling": "token", "dynamic_sampling": True, "overlong_filter": True,
    "loss_agg_func": "seq-mean-token-sum-norm", "loss_agg_length": 10,
}  # fmt: skip
ACTIONS = {
    "kl_beta": 0.1, "loss_agg_func": "seq-mean-token-sum-norm", "loss_agg_length": 10,
    "early_stop_imp_ratio": 3.0,
}  # fmt: skip
IMPORTANCE = {
    "proximal": "recomputed", "importance_sampling": "token", "importance_sampling_clip": 1.3,
}  # fmt: skip
DISTILLATION = {"teacher": Path("policy.safetensors")}
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "tokens", {}) for name in ("ppo", "grpo", "dapo", "reinforce_pp", "rloo", "gspo",
                                        "cispo", "decoupled_ppo")),
    *((name, "tokens", TOKENS) for name in ("ppo", "grpo", "dr_grpo", "reinforce_pp", "gspo",
                                            "cispo", "decoupled_ppo")),
    ("rloo", "tokens", {k: v for k, v in TOKENS.items() if not k.startswith("loss_agg")}),
    ("dapo", "tokens", {"safe_length": 2, "max_length": 6}),
    ("dr_grpo", "tokens", {"loss_agg_length": 10}),
    ("decoupled_ppo", "tokens", {"advantage": "gae"}),
    *((name, "actions", {}) for name in ("ppo", "grpo", "reinforce_pp", "cispo", "decoupled_ppo")),
    ("ppo", "actions", {"logprob_type": "action_level", "entropy_type": "action_level"}),
    *((name, "actions", ACTIONS) for name in ("ppo", "reinforce_pp", "decoupled_ppo")),
    *((name, "actions", {**ACTIONS, **FILTER}) for name in ("grpo", "cispo")),
    *((name, "actions", {**IMPORTANCE, "logprob_type": "action_level"})
      for name in ("ppo", "grpo", "reinforce_pp", "cispo")),
    ("grpo", "actions", IMPORTANCE),
    ("ppo", "actions", {"normalize_rewards": True}),
    ("distillation", "actions", DISTILLATION),
    ("distillation", "actions", {**DISTILLATION, **ACTIONS, **IMPORTANCE}),
    ("nft", "actions", {}),
    ("nft", "actions", {"target_space": "xnext", "xcur_source": "rollout", **FILTER}),
    ("nft", "actions", {"advantage": "raw", "loss_form": "dpo"}),
    ("sac", "actions", {}),
    ("sac", "actions", {"learn_temperature": False}),
    ("dsrl", "actions", {}),
]  # fmt: skip
CHUNK, ACTION_DIM = 3, 2


def section(name: str, family: str, keys: dict[str, Any]) -> AlgorithmConfig:
    given = {"type": name, **keys}
    return REGISTRY.load(name).model_validate(given, context={"family": family})


def plain(value: Any) -> Any:
    """Everything as what == compares by value."""
    if isinstance(value, Tensor):
        return value.detach().double().nan_to_num(1e30).tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_answers(algorithm: Algorithm) -> list[Any]:
    """What becomes of answers of two groups, of which some were cut off."""
    batch = random_batch(seed=3, truncated=torch.arange(8) % 3 == 0)
    moved = batch.log_probs + 1.5 * normal(8, 6, seed=14)
    batch = replace(batch, proximal_log_probs=moved)
    asked = {"proximal_log_probs": None} if not algorithm.needs_proximal else {}
    prepared, metrics = algorithm.prepare(replace(batch, **asked))
    log_probs = (batch.log_probs + 0.5 * normal(8, 6, seed=5)).requires_grad_()
    evaluation = Scores(log_probs, normal(8, 6, seed=6).abs())
    normalizer = algorithm.normalizer(prepared)
    loss, more = algorithm.loss(evaluation, prepared, normalizer=normalizer)
    gradient = torch.autograd.grad(loss, log_probs)
    found = [prepared.advantages, prepared.mask, metrics, loss, more, gradient]
    if algorithm.needs_values:
        values = batch.values + 0.5 * normal(8, 6, seed=7)
        found += algorithm.value_loss(values, prepared, normalizer=normalizer)
    return [*found, algorithm.keep_group(np.ones(4))]


class Velocity:
    """What NFT asks a policy for."""

    def __call__(self, batch: Any, *, velocity: bool) -> Tensor:
        return batch.inputs["point"][:, 0, :1, None] * torch.ones(1, CHUNK, ACTION_DIM)

    def points(self, inputs: Any, *, target: str, resampled: bool) -> Any:
        rows = len(inputs["states"])
        shift = 1.0 if target == "x0" else 2.0
        x = normal(rows, CHUNK, ACTION_DIM, seed=8 if resampled else 9)
        time, std = torch.full((rows,), 0.5), torch.full((rows,), 0.1)
        return Points(x=x, time=time, wanted=x + shift, scale=time, std=std)


@dataclass
class Points:
    x: Tensor
    time: Tensor
    wanted: Tensor
    scale: Tensor
    std: Tensor


def of_velocities(algorithm: Any, trajectory: Any) -> list[Any]:
    prepared, metrics = algorithm.prepare(trajectory)
    asked = algorithm.ask({"policy": Velocity()}, prepared)
    inputs = {**prepared.inputs, **dict(zip(algorithm.asked, asked, strict=True))}
    batch = replace(prepared, inputs=inputs)
    velocity = (asked[-1] + normal(len(batch), CHUNK, ACTION_DIM, seed=4)).requires_grad_()
    found = algorithm.velocity_loss(velocity, batch, normalizer=algorithm.normalizer(batch))
    gradient = torch.autograd.grad(found[0], velocity)
    shares = [algorithm.share(step) for step in range(4)], algorithm.averages
    return [prepared.advantages, prepared.weights, metrics, found, gradient, shares]


def of_chunks(algorithm: Algorithm, *, auto_reset: bool) -> list[Any]:
    """What becomes of a rollout in which two of four episodes end early."""
    steps, envs = 12, 4
    ends = {
        "terminations": flags(steps, envs, [(2, 0)], CHUNK),
        "truncations": flags(steps, envs, [(3, 1)], CHUNK),
    }
    dim = algorithm.value_dim(CHUNK)
    trajectory = random_trajectory(
        steps=steps, envs=envs, chunk=CHUNK, action_dim=ACTION_DIM, value_dim=dim or 1,
        auto_reset=auto_reset, final_values=normal(steps, envs, dim or 1, seed=1),
        versions=torch.arange(steps).unsqueeze(1).expand(steps, envs).clone(), **ends,
    )  # fmt: skip
    if hasattr(algorithm, "velocity_loss"):
        return of_velocities(algorithm, trajectory)
    shape = (steps, envs, CHUNK, ACTION_DIM)
    present = ChunkEvaluation(
        trajectory.log_probs + 0.2 * normal(*shape, seed=2), torch.zeros(shape),
        trajectory.values + 0.1,
    )  # fmt: skip
    prepare = algorithm.prepare_stale if algorithm.needs_present else None
    batch, metrics = prepare(trajectory, present) if prepare else algorithm.prepare(trajectory)
    rows = len(batch)
    batch = replace(batch, version=12, reference_log_probs=batch.log_probs + 0.3)
    given = trajectory.log_probs.flatten(0, 1) + 1.5 * normal(rows, CHUNK, ACTION_DIM, seed=3)
    given = given.requires_grad_()
    values = trajectory.values.flatten(0, 1) + normal(rows, dim or 1, seed=4) if dim else None
    evaluation = ChunkEvaluation(given, normal(rows, CHUNK, ACTION_DIM, seed=6).abs(), values)
    algorithm.begin_phase(0)
    normalizer = algorithm.normalizer(batch)
    loss, more = algorithm.loss(evaluation, batch, normalizer=normalizer)
    gradient = torch.autograd.grad(loss, given, allow_unused=True)
    found = [batch.advantages, batch.weights, metrics, loss, more, list(gradient)]
    return [*found, str(algorithm.reference_weights)]


def of_transitions(algorithm: SAC) -> list[Any]:
    modules, batch = networks(algorithm), drawn(algorithm)
    found: list[Any] = []
    for loss in algorithm.losses():
        value, metrics = loss.of(modules, batch, float(len(batch)))
        found += [loss.name, value, metrics]
    for parameter in modules["critic"].parameters():
        parameter.data.add_(1.0)
    algorithm.after_update(modules)
    targets = list(modules["target_critic"].parameters())
    return [*found, [each.data for each in targets], batch.rewards, batch.inputs["discounts"]]


def outcome(config: AlgorithmConfig) -> Any:
    """All that an algorithm of this section makes of the same data."""
    algorithm = config.build(group_size=2)
    if isinstance(algorithm, SAC):
        return plain(of_transitions(algorithm))
    found = [algorithm.trains_policy(0), algorithm.accepts({"actor/ratio": 2.0})]
    if config.family == "tokens":
        return plain([*found, of_answers(algorithm)])
    rollouts = [of_chunks(algorithm, auto_reset=reset) for reset in (True, False)]
    return plain([*found, rollouts])


def test_every_algorithm_and_every_key_is_looked_at() -> None:
    assert {name for name, _, _ in SETTINGS} == set(ALGORITHMS)
    keys = {key for name in ALGORITHMS for key in REGISTRY.load(name).model_fields}
    assert keys - {"type"} == set(OTHER)
    root = Path(__file__).parents[2]
    for key, file in ELSEWHERE.items():
        assert f"algorithm.{key}" in (root / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "family", "keys"), SETTINGS)
def test_every_key_has_an_effect_or_is_refused(
    name: str, family: str, keys: dict[str, Any]
) -> None:
    config = section(name, family, keys)
    before, idle = outcome(config), []
    for key in sorted(set(type(config).model_fields) - {"type", *ELSEWHERE}):
        for value in OTHER[key]:
            if value == getattr(config, key):
                continue
            try:
                changed = section(name, family, {**keys, key: value})
            except ValidationError:
                continue
            if not equal_by_nature(config, key) and outcome(changed) == before:
                idle.append((key, value))
    assert not idle
