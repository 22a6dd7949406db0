"""The whole chain (policy, rollout, advantages, loss, optimizer) on a task with a known optimum."""

from __future__ import annotations

import pytest
import torch

from rlinf.algorithms.config import AlgorithmConfig, GRPOConfig, PPOConfig
from rlinf.algorithms.protocol import Algorithm
from rlinf.data.trajectory import Trajectory
from rlinf.envs.spec import EnvSpec
from rlinf.models.config import MLPConfig
from rlinf.models.policy import RAW_ACTIONS, Policy
from tests.algorithms.rollouts import flags, random_trajectory

ENVS, STEPS, GROUP = 64, 4, 8
SPEC = EnvSpec(
    observation_shapes={"states": (2,)},
    observation_dtypes={"states": "float32"},
    action_kind="continuous",
    action_dim=2,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    task_descriptions=(),
    max_episode_steps=1,
)


def best_action(states: torch.Tensor) -> torch.Tensor:
    return 0.5 * states.flip(-1)


def rollout(policy: Policy, generator: torch.Generator) -> Trajectory:
    """Episodes of one step, reward −|a − a*(s)|²; the environments of a group see one state."""
    groups = ENVS // GROUP
    states = torch.randn(STEPS, groups, 2, generator=generator).repeat_interleave(GROUP, 1)
    noise = torch.randn(STEPS, ENVS, 1, 2, generator=generator)
    rows = [policy.sample({"states": states[t]}, {"actions": noise[t]}) for t in range(STEPS)]
    values = torch.stack([policy.value({"states": seen}) for seen in states])
    actions = torch.stack([row.forward_inputs[RAW_ACTIONS] for row in rows])
    executed = torch.stack([row.actions for row in rows])
    return random_trajectory(
        steps=STEPS,
        envs=ENVS,
        value_dim=policy.value_dim,
        forward_inputs={"states": states, RAW_ACTIONS: actions},
        log_probs=torch.stack([row.log_probs for row in rows]),
        values=values,
        rewards=-(executed[:, :, 0] - best_action(states)).square().sum(-1, keepdim=True),
        terminations=flags(STEPS, ENVS, [(t, b) for t in range(STEPS) for b in range(ENVS)]),
        bootstrap_values=values[-1],
        reset_seeds=torch.arange(STEPS).unsqueeze(1) * 100 + torch.arange(ENVS) // GROUP,
    )


def update(policy: Policy, algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(optimizer.param_groups[0].setdefault("rollouts", 0))
    optimizer.param_groups[0]["rollouts"] += 1
    batch, _ = algorithm.prepare(rollout(policy, generator))
    for _ in range(4):
        for indices in torch.randperm(len(batch), generator=generator).split(64):
            part = batch.select(indices)
            evaluation = policy.evaluate_actions(part.inputs)
            loss, _ = algorithm.loss(evaluation, part, normalizer=algorithm.normalizer(part))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    policy.update_normalizer(batch.inputs)


def error(policy: Policy) -> float:
    states = torch.randn(500, 2, generator=torch.Generator().manual_seed(99))
    actions = policy.sample({"states": states}, None).forward_inputs[RAW_ACTIONS][:, 0]
    inside = best_action(states).abs().amax(-1) < 0.9
    return (actions - best_action(states))[inside].square().sum(-1).mean().item()


@pytest.mark.parametrize("config", [PPOConfig(normalize_rewards=True), GRPOConfig()])
def test_the_policy_finds_the_best_action(config: AlgorithmConfig) -> None:
    algorithm = config.build(family="actions", group_size=GROUP)
    policy = MLPConfig(hidden_sizes=(32,), initial_log_std=-0.5).build(
        SPEC, value_dim=algorithm.value_dim(1), seed=0
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    before = error(policy)
    for _ in range(40):
        update(policy, algorithm, optimizer)
    assert before > 0.1
    assert error(policy) < 0.02
