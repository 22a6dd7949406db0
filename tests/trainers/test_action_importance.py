"""Importance weights of actions: what the trainer computes, over what acted and was rounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.base_config import REGISTRY as ALGORITHMS
from rlinf.algorithms.losses import at_level
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import ACTION_MASK
from rlinf.models.adapters import in_precision
from rlinf.models.config import REGISTRY as MODELS
from rlinf.models.policy import Policy, draw_noise, of_own_dimensions
from rlinf.trainers.config import ActorConfig
from rlinf.trainers.ranks import Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer
from tests.algorithms.rollouts import flags, random_trajectory
from tests.models.test_policies import env_spec

STEPS, ENVS, CHUNK = 2, 4, 2
WIDE = {"first_update_kl_bound": 10.0, "first_update_ratio_bound": 10.0}
CORRECTED = {"proximal": "recomputed", "importance_sampling": "token"}
SPEC = env_spec(
    observation_shapes={"states": (5,), "main_images": (32, 32, 3), ACTION_MASK: (3,)},
    observation_dtypes={"states": "float32", "main_images": "uint8", ACTION_MASK: "bool"},
    task_descriptions=("close the drawer",),
)


def policy(value_dim: int) -> Policy:
    options = {"preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": 2}
    config = MODELS.load("pi05")(method="flow_sde", **options)
    built: Policy = config.build(SPEC, value_dim=value_dim, seed=0)
    return built


@cache
def rollout(value_dim: int = 1, seed: int = 0) -> Trajectory:
    """What the policy does in float32, in environments of which two lack an action dimension."""
    generator = torch.Generator().manual_seed(seed)
    rows = STEPS * ENVS
    shape = (rows, *SPEC.observation_shapes["main_images"])
    seen = {
        "states": torch.randn(rows, 5, generator=generator),
        "main_images": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        ACTION_MASK: torch.tensor([[True] * 3, [True, True, False]]).repeat(rows // 2, 1),
    }
    acting = policy(value_dim)
    done = acting.sample(seen, draw_noise(acting.noise, (rows,), generator))
    log_probs = of_own_dimensions(done.log_probs, seen)  # as rollout workers do
    inputs = {
        name: column.unflatten(0, (STEPS, ENVS))
        for name, column in (seen | done.forward_inputs).items()
    }
    return random_trajectory(
        steps=STEPS, envs=ENVS, chunk=CHUNK, value_dim=value_dim, seed=seed,
        forward_inputs=inputs, log_probs=log_probs.unflatten(0, (STEPS, ENVS)),
        values=acting.value(seen).detach().unflatten(0, (STEPS, ENVS)),
        reset_seeds=torch.zeros(STEPS, ENVS, dtype=torch.int64),
        terminations=flags(STEPS, ENVS, [(STEPS - 1, env) for env in range(ENVS)], CHUNK),
    )  # fmt: skip


def trainer(
    kind: str,
    keys: dict[str, Any],
    *,
    param: str = "bfloat16",
    ranks: Replicas | None = None,
    micro_batch_size: int = 4,
) -> Trainer:
    config = ALGORITHMS.load(kind).model_validate({"type": kind, **keys})
    algorithm = config.build(family="actions", group_size=ENVS)
    actor = ActorConfig.model_validate({
        "precision": {"param": param}, "global_batch_size": STEPS * ENVS, "update_epoch": 1,
        "micro_batch_size": micro_batch_size, **WIDE,
    })  # fmt: skip
    trained = policy(algorithm.value_dim(CHUNK))
    return Trainer(
        {"policy": trained}, algorithm, actor, ranks=ranks, rows=STEPS * ENVS, total_steps=4, seed=5
    )


def weights(of: Trainer) -> Tensor:
    return torch.cat([each.float().flatten() for _, each in of.weights()])


@pytest.mark.parametrize(
    ("kind", "level"),
    [("grpo", "token_level"), ("ppo", "action_level"), ("cispo", "chunk_level"),
     ("reinforce_pp", "token_level")],
)  # fmt: skip
def test_the_loss_is_weighted_by_what_was_rounded_otherwise(kind: str, level: str) -> None:
    """exp(recomputed − rollout) within its bounds, of the terms that an environment has."""
    own = {"importance_sampling_clip": 1.01, "importance_sampling_min": 0.99}
    corrected = trainer(kind, {**CORRECTED, **own, "logprob_type": level})
    trajectory = rollout(1 if kind == "ppo" else 0)
    batch, _ = corrected.prepare(trajectory)
    half = in_precision(policy(1 if kind == "ppo" else 0), torch.bfloat16)
    with torch.no_grad():
        recomputed = at_level(half(batch).log_probs, level)  # type: ignore[arg-type]
    assert batch.proximal_log_probs is not None
    assert torch.equal(batch.proximal_log_probs, recomputed)
    assert torch.equal(batch.log_probs, at_level(trajectory.log_probs.flatten(0, 1), level))  # type: ignore[arg-type]
    raw, mask = (recomputed - batch.log_probs).exp(), batch.mask
    expected = raw.clamp(0.99, 1.01)
    outside = (raw != expected) & (mask > 0)
    assert 0 < outside.sum() < mask.sum()
    metrics = corrected.train(batch, 0)
    mean = float((expected * mask).sum() / mask.sum())
    assert metrics["actor/importance_weight"] == pytest.approx(mean, abs=1e-6)
    share = float(outside.sum() / mask.sum())
    assert metrics["actor/importance_clip_fraction"] == pytest.approx(share, abs=1e-6)
    if kind != "cispo":  # before the first update every ratio to the proximal policy is 1
        assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-6)
        loss = -float((expected * batch.advantages * mask).sum() / mask.sum())
        assert metrics["actor/policy_loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "cispo"])
def test_in_float32_every_weight_is_1_and_the_loss_the_same(kind: str) -> None:
    found = []
    for keys in ({}, CORRECTED):
        plain = trainer(kind, keys, param="float32", micro_batch_size=2)
        metrics = plain.learn(rollout(1 if kind == "ppo" else 0), 0)
        found.append((weights(plain), metrics["actor/loss"], metrics["actor/grad_norm"]))
    assert metrics["actor/importance_weight"] == 1
    assert metrics["actor/behave_approx_kl"] == 0
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_decoupled_ppo_has_a_proximal_policy_of_its_own_rounding() -> None:
    """Values stay those of the rollout, whose weights are the present ones."""
    half, whole = (trainer("decoupled_ppo", {}, param=param) for param in ("bfloat16", "float32"))
    (batch, _), (other, _) = (each.prepare(rollout()) for each in (half, whole))
    assert not torch.equal(batch.proximal_log_probs, batch.log_probs)  # type: ignore[arg-type]
    assert torch.equal(other.proximal_log_probs, other.log_probs)  # type: ignore[arg-type]
    assert torch.equal(batch.advantages, other.advantages)  # type: ignore[arg-type]
    assert half.train(batch, 0)["actor/proximal_ratio"] != 1


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_older_weights_are_corrected_for(kind: str, proximal: str, param: str) -> None:
    corrected = trainer(kind, {**CORRECTED, "proximal": proximal}, param=param)
    trajectory = rollout(1 if kind == "ppo" else 0)
    corrected.learn(trajectory, 0)
    batch, _ = corrected.prepare(trajectory)
    if proximal == "recomputed":
        assert torch.equal(batch.proximal_log_probs, corrected.log_probs(batch))  # type: ignore[arg-type]
    metrics = corrected.train(batch, 1)
    assert metrics["actor/importance_weight"] != 1
    assert metrics["actor/importance_weight"] <= 2


def test_ranks_and_a_resumed_trainer_give_the_same_bits() -> None:
    """Two phases, the second on a rollout of older weights."""
    keys = {**CORRECTED, "logprob_type": "token_level"}
    alone = trainer("grpo", keys)
    first = alone.learn(rollout(0), 0)
    state = alone.state_dict()
    resumed = trainer("grpo", keys)
    resumed.load_state_dict(state)
    expected = alone.learn(rollout(0, 1), 1)
    assert resumed.learn(rollout(0, 1), 1) == expected
    assert torch.equal(weights(resumed), weights(alone))
    parts: list[Tensor | None] = [None, None]
    barrier = threading.Barrier(2)

    def run(rank: int) -> tuple[Tensor, list[dict[str, float]]]:
        def all_reduce(part: Tensor) -> Tensor:
            parts[rank] = part
            barrier.wait(60)
            total = sum_ranks([each for each in parts if each is not None])
            barrier.wait(60)
            return total

        one = trainer("grpo", keys, ranks=Replicas(rank, 2, all_reduce=all_reduce))
        metrics = [one.learn(rollout(0, step), step) for step in range(2)]
        return weights(one), metrics

    with ThreadPoolExecutor(2) as pool:
        for found, metrics in pool.map(run, range(2)):
            assert torch.equal(found, weights(alone))
            assert metrics == [first, expected]


def test_rows_that_a_fault_spoilt_are_not_recomputed() -> None:
    valid = torch.ones(STEPS, ENVS, dtype=torch.bool)
    valid[0, 1] = False
    spoilt = replace(rollout(), valid=valid)
    batch, _ = trainer("ppo", CORRECTED).prepare(spoilt)
    assert batch.proximal_log_probs is not None
    assert batch.proximal_log_probs.shape == batch.log_probs.shape
    assert len(batch) < STEPS * ENVS
