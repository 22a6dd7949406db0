from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.distributions import Normal

from rlinf.checkpoint.export import export_weights
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import CNNConfig, MLPConfig, ModelConfig
from rlinf.models.gaussian import gaussian_entropy, gaussian_log_prob
from rlinf.models.mlp import MLPPolicy
from rlinf.models.policy import RAW_ACTIONS, ObservationNormalizer, Policy
from rlinf.models.registry import REGISTRY, build_policy

STATE_DIM, ACTION_DIM = 5, 3


def env_spec(**replaced: Any) -> EnvSpec:
    options: dict[str, Any] = {
        "observation_shapes": {"states": (STATE_DIM,), "main_images": (36, 40, 3)},
        "observation_dtypes": {"states": "float32", "main_images": "uint8"},
        "action_kind": "continuous",
        "action_dim": ACTION_DIM,
        "action_low": (-1.0, -0.5, -2.0),
        "action_high": (1.0, 0.5, 2.0),
        "task_descriptions": (),
        "max_episode_steps": 10,
    }
    return EnvSpec(**(options | replaced))


def observations(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, 36, 40, 3), dtype=np.uint8)
    states = rng.normal(size=(rows, STATE_DIM)).astype(np.float32)
    return {"states": torch.from_numpy(states), "main_images": torch.from_numpy(images)}


def noise(rows: int, chunk: int = 1) -> torch.Tensor:
    return torch.randn(rows, chunk, ACTION_DIM, generator=torch.Generator().manual_seed(4))


CONFIGS: dict[str, ModelConfig] = {
    "mlp": MLPConfig(policy_gain=1.0),
    "mlp chunks": MLPConfig(policy_gain=1.0, num_action_chunks=4, activation="relu"),
    "mlp state-dependent": MLPConfig(policy_gain=1.0, state_dependent_std=True),
    "cnn": CNNConfig(policy_gain=1.0, image_features=16),
    "cnn separate": CNNConfig(
        policy_gain=1.0, image_features=16, shared_encoder=False, use_states=False
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.fixture
def policy(config: ModelConfig) -> Policy:
    return build_policy(config, env_spec(), seed=1)


def test_shapes_and_the_action_box(policy: Policy) -> None:
    sample = policy.sample(observations(64), 3 * noise(64, policy.chunk))
    assert sample.actions.shape == sample.log_probs.shape == (64, policy.chunk, ACTION_DIM)
    assert policy.value(observations(64)).shape == (64, 1)
    low, high = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([1.0, 0.5, 2.0])
    assert bool(((sample.actions >= low) & (sample.actions <= high)).all())
    raw = sample.forward_inputs[RAW_ACTIONS]
    assert bool((raw.abs() > 1).any())
    torch.testing.assert_close(sample.actions, raw.clamp(low, high))


def test_training_repeats_what_the_rollout_computed(policy: Policy) -> None:
    seen = observations(32)
    sample = policy.sample(seen, noise(32, policy.chunk))
    evaluation = policy.evaluate_actions(seen | sample.forward_inputs)
    torch.testing.assert_close(evaluation.log_probs, sample.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(evaluation.values, policy.value(seen))
    log_ratio = (evaluation.log_probs - sample.log_probs).sum((1, 2))
    assert (log_ratio.exp() - 1 - log_ratio).mean().abs() < 1e-6


def test_without_noise_the_mode_is_taken(policy: Policy) -> None:
    sample = policy.sample(observations(8), None)
    zero = policy.sample(observations(8), torch.zeros(8, policy.chunk, ACTION_DIM))
    assert torch.equal(sample.actions, zero.actions)
    noisy = policy.sample(observations(8), noise(8, policy.chunk))
    assert bool((noisy.log_probs <= sample.log_probs + 1e-6).all())


def test_every_parameter_gets_a_gradient(policy: Policy) -> None:
    seen = observations(8)
    sample = policy.sample(seen, noise(8, policy.chunk))
    evaluation = policy.evaluate_actions(seen | sample.forward_inputs)
    (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_value_parameters_do_not_move_the_actions(policy: Policy) -> None:
    owned = {id(parameter) for parameter in policy.value_parameters()}
    assert owned < {id(parameter) for parameter in policy.parameters()}
    before, values = policy.sample(observations(4), None), policy.value(observations(4))
    with torch.no_grad():
        for parameter in policy.value_parameters():
            parameter.add_(0.1)
    after = policy.sample(observations(4), None)
    assert torch.equal(before.actions, after.actions)
    assert not torch.equal(values, policy.value(observations(4)))


def test_weights_depend_on_the_seed_alone(policy: Policy) -> None:
    path = export_weights(tmp_path / "policy.safetensors", policy.state_dict())
    begun = config.model_copy(update={"path": path})
    begun.check()
    again = build_policy(begun, env_spec(), seed=2).state_dict()
    assert all(torch.equal(again[name], each) for name, each in policy.state_dict().items())
    imitating = build_policy(config, env_spec(), value_dim=0, seed=3).state_dict()
    export_weights(path, imitating)
    fresh = build_policy(config, env_spec(), seed=2).state_dict()
    with_critic = build_policy(begun, env_spec(), seed=2).state_dict()
    expected = fresh | imitating
    assert all(torch.equal(with_critic[name], each) for name, each in expected.items())
    with pytest.raises(ConfigError, match=r"^model\.path: .*is of another model"):
        build_policy(begun, env_spec(action_dim=2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2))
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no weights"):
        build_policy(begun, env_spec())
    path.unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*policy\.safetensors"):
        begun.check()
