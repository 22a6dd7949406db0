"""A policy whose states and actions are padded learns what one without padding learns.

The rows of one simulator, once as they are and once padded as beside a larger simulator, with equal
weights where both have some: log-probs, losses, statistics and every update are the same, and the
weights that belong to the padding stay what they were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import GRPOConfig, PPOConfig, SACConfig
from rlinf.algorithms.sac import NEXT_NOISE, NOISE, SAC
from rlinf.data.trajectory import Trajectory
from rlinf.envs.spec import EnvSpec
from rlinf.models.config import MLPConfig, SquashedMLPConfig
from rlinf.models.policy import RAW_ACTIONS, Policy, of_own_dimensions
from rlinf.trainers.config import ActorConfig, OptimizerConfig
from rlinf.trainers.trainer import Trainer
from rlinf.workers.config.off_policy import LearnerConfig, OffPolicyOptimizerConfig

T, B, C = 6, 8, 2
STATES, ACTIONS, PADDED_STATES, PADDED_ACTIONS = 3, 2, 5, 4
SHAPES = {"task_ids": ()}
DTYPES = {"states": "float32", "task_ids": "int64"}


def spec(states: int, actions: int, **more: Any) -> EnvSpec:
    return EnvSpec(
        observation_shapes={"states": (states,), **SHAPES, **more.pop("shapes", {})},
        observation_dtypes=DTYPES,
        action_kind="continuous",
        action_dim=actions,
        action_low=(-1.0,) * actions,
        action_high=(1.0,) * actions,
        task_descriptions=("one", "other"),
        max_episode_steps=T,
        **more,
    )


PLAIN = spec(STATES, ACTIONS)
PADDED = spec(
    PADDED_STATES, PADDED_ACTIONS, task_sections=(0, 1), shapes={"action_mask": (PADDED_ACTIONS,)}
)


def places(plain: Tensor, padded: Tensor) -> tuple[Tensor, ...]:
    """Where in a padded weight, along each dimension, the entries of a plain one lie."""

    def along(size: int, larger: int) -> Tensor:
        if size == larger:
            return torch.arange(size)
        states = [*range(STATES)]
        tasks = [PADDED_STATES, PADDED_STATES + 1]
        actions = [c * PADDED_ACTIONS + a for c in range(C) for a in range(ACTIONS)]
        after = [*states, *tasks, *(PADDED_STATES + 2 + place for place in actions)]
        two = [place + half * C * PADDED_ACTIONS for half in (0, 1) for place in actions]
        known = {
            (STATES, PADDED_STATES): states,
            (STATES + 2, PADDED_STATES + 2): [*states, *tasks],
            (ACTIONS, PADDED_ACTIONS): [*range(ACTIONS)],
            (C * ACTIONS, C * PADDED_ACTIONS): actions,
            (2 * C * ACTIONS, 2 * C * PADDED_ACTIONS): two,
            (STATES + 2 + C * ACTIONS, PADDED_STATES + 2 + C * PADDED_ACTIONS): after,
        }
        return torch.tensor(known[size, larger])

    assert plain.ndim == padded.ndim
    parts = [along(*sizes) for sizes in zip(plain.shape, padded.shape, strict=True)]
    return torch.meshgrid(*parts, indexing="ij") if parts else ()


def pairs(plain: torch.nn.Module, padded: torch.nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Weights and statistics of both; of the padded one those of the first simulator."""
    found = []
    larger = padded.state_dict()
    for name, own in plain.state_dict().items():
        other = larger[name]
        found.append((name, own, other[0] if "normalizer" in name else other))
    return found


def share_weights(plain: torch.nn.Module, padded: torch.nn.Module) -> None:
    for _, own, other in pairs(plain, padded):
        own.copy_(other[places(own, other)])


def assert_equal_weights(plain: torch.nn.Module, padded: torch.nn.Module) -> None:
    for name, own, other in pairs(plain, padded):
        torch.testing.assert_close(other[places(own, other)], own, rtol=2e-5, atol=2e-6, msg=name)


def assert_untouched(before: dict[str, Tensor], plain: Any, padded: torch.nn.Module) -> None:
    for name, own in plain.state_dict().items():
        if "normalizer" in name or not own.ndim:
            continue
        padding = torch.ones_like(before[name], dtype=torch.bool)
        padding[places(own, before[name])] = False
        assert torch.equal(padded.state_dict()[name][padding], before[name][padding]), name


def wider(column: Tensor, size: int, fill: float = 0.0) -> Tensor:
    missing = column.new_full((*column.shape[:-1], size - column.shape[-1]), fill)
    return torch.cat([column, missing], dim=-1)


def rollout(policy: Policy, step: int, *, padded: bool) -> Trajectory:
    """What a policy does in states that do not depend on it, and is paid for."""
    generator = torch.Generator().manual_seed(step)
    states = torch.randn(T, B, STATES, generator=generator) * 3 + 1
    noise = torch.randn(T, B, C, PADDED_ACTIONS, generator=generator)
    seen: dict[str, Tensor] = {"states": states, "task_ids": torch.zeros(T, B, dtype=torch.int64)}
    if padded:
        seen["states"] = wider(states, PADDED_STATES)
        mask = torch.arange(PADDED_ACTIONS) < ACTIONS
        seen["action_mask"] = mask.expand(T, B, PADDED_ACTIONS)
    flat = {name: column.flatten(0, 1) for name, column in seen.items()}
    drawn = noise if padded else noise[..., :ACTIONS]
    sample = policy.sample(flat, {"actions": drawn.flatten(0, 1)})
    log_probs = of_own_dimensions(sample.log_probs, flat)
    ends = torch.zeros(T, B, C, dtype=torch.bool)
    ends[-1, :, -1] = True
    values = policy.value(flat).view(T, B, -1)
    return Trajectory(
        forward_inputs={
            **seen,
            **{name: each.unflatten(0, (T, B)) for name, each in sample.forward_inputs.items()},
        },
        log_probs=log_probs.unflatten(0, (T, B)),
        values=values,
        rewards=-sample.actions[..., :ACTIONS].square().sum(-1).unflatten(0, (T, B)),
        terminations=ends,
        truncations=torch.zeros_like(ends),
        final_values=torch.zeros_like(values),
        bootstrap_values=torch.zeros_like(values[0]),
        valid=torch.ones(T, B, dtype=torch.bool),
        versions=torch.full((T, B), step),
        env_ids=torch.arange(B),
        episode_ids=torch.arange(B).expand(T, B) + B * step,
        reset_seeds=(torch.arange(B) // 4).expand(T, B).clone(),
    )


POLICY_LEVELS = {
    "chunks": {},
    "primitive actions": {"logprob_type": "action_level", "entropy_type": "action_level"},
    "dimensions": {"logprob_type": "token_level", "entropy_type": "token_level"},
    "entropy of dimensions": {"logprob_type": "chunk_level", "entropy_type": "token_level"},
    "sums of rows": {"logprob_type": "token_level", "loss_agg_func": "seq-mean-token-sum"},
}


@pytest.mark.parametrize("levels", POLICY_LEVELS.values(), ids=POLICY_LEVELS)
@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_policy_gradients_do_not_see_the_padding(kind: Any, levels: dict[str, Any]) -> None:
    given = {"type": kind.model_fields["type"].default, "entropy_bonus": 0.01, **levels}
    config = kind.model_validate(given, context={"family": "actions"})
    model = MLPConfig(hidden_sizes=(16,), num_action_chunks=C, policy_gain=1.0)
    optim = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
    actor = ActorConfig(global_batch_size=16, micro_batch_size=8, update_epoch=2, optim=optim)
    runs = []
    for each in (PLAIN, PADDED):
        algorithm = config.build(group_size=4)
        policy = model.build(each, value_dim=algorithm.value_dim(C), seed=1)
        runs.append((policy, Trainer({"policy": policy}, algorithm, actor, total_steps=9, seed=0)))
    (plain, first), (padded, second) = runs
    share_weights(plain, padded)
    before = {name: tensor.clone() for name, tensor in padded.state_dict().items()}
    for step in range(3):
        rollouts = [rollout(each, step, padded=each is padded) for each in (plain, padded)]
        found = [trainer.learn(given, step) for trainer, given in
                 zip((first, second), rollouts, strict=True)]  # fmt: skip
        for name, value in found[0].items():
            assert found[1][name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        assert_equal_weights(plain, padded)
    assert not torch.equal(padded.actor.layers[0].weight, before["actor.layers.0.weight"])
    assert_untouched(before, plain, padded)


def transitions(step: int, *, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, states, following, actions = 32, normal(32, STATES), normal(32, STATES), normal(32, C, 4)
    drawn = {NOISE: normal(32, C, 4), NEXT_NOISE: normal(32, C, 4), RAW_ACTIONS: actions.tanh()}
    tasks = torch.zeros(rows, dtype=torch.int64)
    inputs: dict[str, Tensor] = {"discounts": torch.full((rows,), 0.9)}
    for prefix, seen in (("", states), ("next.", following)):
        inputs[f"{prefix}states"] = wider(seen, PADDED_STATES) if padded else seen
        inputs[f"{prefix}task_ids"] = tasks
        if padded:
            mask = torch.arange(PADDED_ACTIONS) < ACTIONS
            inputs[f"{prefix}action_mask"] = mask.expand(rows, PADDED_ACTIONS)
    for name, column in drawn.items():  # what is sampled in the padding is anything
        inputs[name] = column if padded else column[..., :ACTIONS]
    batch = Batch.of(inputs=inputs, mask=torch.ones(rows, 1))
    return replace(batch, rewards=normal(rows))


def test_soft_actor_critic_does_not_see_the_padding() -> None:
    model = SquashedMLPConfig(hidden_sizes=(16,), q_hidden_sizes=(16,), num_action_chunks=C)
    optim = OffPolicyOptimizerConfig(lr=1e-2, eps=1e-5, max_grad_norm=0.5)
    config = LearnerConfig(global_batch_size=32, micro_batch_size=16, optim=optim)
    runs = []
    for each in (PLAIN, PADDED):
        algorithm = SAC(SACConfig())
        modules = algorithm.modules(model, each, seed=3)
        runs.append((modules, Trainer(modules, algorithm, config, total_steps=9, seed=0)))
    (plain, first), (padded, second) = runs
    for name, module in plain.items():
        share_weights(module, padded[name])
    before = {n: {k: t.clone() for k, t in m.state_dict().items()} for n, m in padded.items()}
    for step in range(4):
        batches = [transitions(step, padded=False), transitions(step, padded=True)]
        found = [trainer.train([batch], step) for trainer, batch in
                 zip((first, second), batches, strict=True)]  # fmt: skip
        for trainer, batch in zip((first, second), batches, strict=True):
            trainer.observe(batch.inputs)
        for name, value in found[0].items():
            assert found[1][name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        for name, module in plain.items():
            assert_equal_weights(module, padded[name])
    for name, module in plain.items():
        assert_untouched(before[name], module, padded[name])
    assert float(padded["temperature"].log_alpha) != float(before["temperature"]["log_alpha"])


def test_each_simulator_has_statistics_of_its_own_and_padding_stays_zero() -> None:
    policy = MLPConfig(hidden_sizes=(4,)).build(PADDED, seed=0)
    generator = torch.Generator().manual_seed(0)
    own, large = torch.randn(50, STATES, generator=generator) * 5 + 2, torch.randn(50, 5) - 40
    states = torch.cat([wider(own, PADDED_STATES), large])
    tasks = torch.tensor([0] * 50 + [1] * 50)
    for rows in torch.randperm(100, generator=generator).split(30):
        policy.update_normalizer({"states": states[rows], "task_ids": tasks[rows]})
    scaled = policy.normalizer(states, tasks)
    for part in (scaled[:50, :STATES], scaled[50:]):
        torch.testing.assert_close(part.mean(0), torch.zeros(part.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(part.var(0, correction=0), torch.ones(part.shape[1]))
    assert not scaled[:50, STATES:].any()
    with pytest.raises(ValueError, match="task_ids must say"):
        policy.normalizer(states)
