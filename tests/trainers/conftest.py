"""A small policy and a made-up rollout for trainer tests."""

import pytest
import torch

from rlinf.algorithms.config import PPOConfig
from rlinf.data.trajectory import Trajectory
from rlinf.envs.spec import EnvSpec
from rlinf.models.config import MLPConfig

STEPS, ENVS, STATE_DIM, ACTION_DIM = 16, 4, 5, 2
SPEC = EnvSpec(
    observation_shapes={"states": (STATE_DIM,)},
    observation_dtypes={"states": "float32"},
    action_kind="continuous",
    action_dim=ACTION_DIM,
    action_low=(-1.0,) * ACTION_DIM,
    action_high=(1.0,) * ACTION_DIM,
    task_descriptions=(),
    max_episode_steps=100,
)


@pytest.fixture
def env_spec() -> EnvSpec:
    return SPEC


@pytest.fixture
def make_policy(env_spec):
    def make(**options):
        return MLPConfig(hidden_sizes=(16, 16), **options).build(env_spec, seed=3)

    return make


@pytest.fixture
def make_algorithm():
    def make(**options):
        return PPOConfig(**options).build(family="actions")

    return make


def collect(policy, *, seed: int = 0) -> Trajectory:
    """What a policy does on random observations."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(STEPS, ENVS, STATE_DIM, generator=generator)
    noise = torch.randn(STEPS, ENVS, 1, ACTION_DIM, generator=generator)
    samples = [
        policy.sample({"states": s}, {"actions": n}) for s, n in zip(states, noise, strict=True)
    ]
    ends = torch.zeros(STEPS, ENVS, 1, dtype=torch.bool)
    whole = torch.zeros(STEPS, ENVS, dtype=torch.int64)
    return Trajectory(
        forward_inputs={
            "states": states,
            **{
                key: torch.stack([sample.forward_inputs[key] for sample in samples])
                for key in samples[0].forward_inputs
            },
        },
        log_probs=torch.stack([sample.log_probs for sample in samples]),
        values=torch.stack([policy.value({"states": s}) for s in states]),
        rewards=torch.randn(STEPS, ENVS, 1, generator=generator),
        terminations=ends,
        truncations=ends,
        final_values=torch.zeros(STEPS, ENVS, 1),
        bootstrap_values=torch.zeros(ENVS, 1),
        valid=torch.ones(STEPS, ENVS, dtype=torch.bool),
        versions=whole,
        env_ids=torch.arange(ENVS),
        episode_ids=whole,
        reset_seeds=whole,
    )


@pytest.fixture
def rollout():
    """A function that lets a policy act on random observations and gives the trajectory."""
    return collect
