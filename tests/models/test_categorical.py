"""The categorical policy against torch's distribution, and in environments of discrete actions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.categorical import CategoricalPolicy
from rlinf.models.config import (
    CategoricalCNNConfig,
    CategoricalMLPConfig,
    MLPConfig,
    TrunkPolicyConfig,
)
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, draw_noise
from rlinf.trainers.policy_conformance import check_policy
from tests.models.test_policies import env_spec

CHOICES = 5
SPEC: EnvSpec = env_spec(
    observation_shapes={"states": (3,), "main_images": (36, 40, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8"},
    action_kind="discrete",
    action_dim=1,
    action_low=(0.0,),
    action_high=(CHOICES - 1.0,),
)
CONFIG = CategoricalMLPConfig(policy_gain=1.0, num_action_chunks=2, hidden_sizes=(16,))
PICTURES: dict[str, Any] = {
    "policy_gain": 1.0, "num_action_chunks": 2, "hidden_sizes": (16,), "image_features": 8,
}  # fmt: skip
CONFIGS: dict[str, TrunkPolicyConfig] = {
    "states": CONFIG,
    "pictures": CategoricalCNNConfig(**PICTURES, use_states=False, shared_encoder=False),
    "pictures and states": CategoricalCNNConfig(**PICTURES),
    "pictures, critic of states": CategoricalCNNConfig(
        **PICTURES, use_states=False, critic_reads="states"
    ),
}


def built(config: TrunkPolicyConfig = CONFIG) -> CategoricalPolicy:
    policy = config.build(SPEC)
    assert isinstance(policy, CategoricalPolicy)
    return policy


def seen(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "states": torch.randn(rows, 3, generator=generator),
        "main_images": torch.randint(256, (rows, 36, 40, 3), generator=generator).byte(),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_it_keeps_the_protocol_of_policies(name: str) -> None:
    results = check_policy(CONFIGS[name], SPEC, ranks=False)
    assert [each for each in results if not each.passed] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_entropy_are_those_of_torch(name: str) -> None:
    policy, states = built(CONFIGS[name]), seen(50)
    noise = draw_noise(policy.noise, (50,), torch.Generator().manual_seed(1))
    sample = policy.sample(states, noise)
    logits = policy.actor(policy.encode(states)).view(50, 2, CHOICES)
    reference = torch.distributions.Categorical(logits=logits)
    chosen = sample.forward_inputs[RAW_ACTIONS][..., 0]
    found = policy.evaluate_actions(states | sample.forward_inputs)
    torch.testing.assert_close(found.log_probs[..., 0], reference.log_prob(chosen))
    torch.testing.assert_close(found.entropy[..., 0], reference.entropy())
    assert set(chosen.unique().tolist()) == set(range(CHOICES))
    assert torch.equal(policy.sample(states, None).actions[..., 0], logits.argmax(-1).float())


def test_uniform_noise_draws_each_action_as_often_as_it_is_likely() -> None:
    """The inverse of the distribution function, at evenly spaced numbers: exact but for one."""
    policy, rows = built(), 2000
    states = {"states": seen(1)["states"].expand(rows, -1)}
    even = ((torch.arange(rows) + 0.5) / rows).view(rows, 1, 1).expand(rows, 2, 1)
    actions = policy.sample(states, {ACTIONS: even}).actions[:, 0, 0].long()
    share = torch.bincount(actions, minlength=CHOICES) / rows
    logits = policy.actor(policy.encode(states))[0, :CHOICES]
    torch.testing.assert_close(share, logits.softmax(-1), rtol=0, atol=2 / rows)
    for edge in (0.0, 1 - 2**-24):  # the ends of what is drawn
        sample = policy.sample(states, {ACTIONS: torch.full((rows, 2, 1), edge)})
        assert bool(((sample.actions >= 0) & (sample.actions < CHOICES)).all())
        assert bool(sample.log_probs.isfinite().all())


@pytest.mark.parametrize("choices", [(2, 5, 3), (4, 4)])
def test_several_choices_are_those_of_torch_one_by_one(choices: tuple[int, ...]) -> None:
    spec = replace(
        SPEC,
        action_dim=len(choices),
        action_low=(0.0,) * len(choices),
        action_high=tuple(n - 1.0 for n in choices),
    )
    assert [each for each in check_policy(CONFIG, spec, ranks=False) if not each.passed] == []
    policy, states = CONFIG.build(spec), seen(200)
    assert isinstance(policy, CategoricalPolicy)
    noise = draw_noise(policy.noise, (200,), torch.Generator().manual_seed(1))
    sample = policy.sample(states, noise)
    found = policy.evaluate_actions(states | sample.forward_inputs)
    chosen, best = sample.actions, policy.sample(states, None).actions
    logits = policy.actor(policy.encode(states)).view(200, 2, sum(choices))
    for place, part in enumerate(logits.split(choices, dim=-1)):
        reference = torch.distributions.Categorical(logits=part)
        torch.testing.assert_close(
            found.log_probs[..., place], reference.log_prob(chosen[..., place])
        )
        torch.testing.assert_close(found.entropy[..., place], reference.entropy())
        assert set(chosen[..., place].unique().tolist()) == set(range(choices[place]))
        assert torch.equal(best[..., place], part.argmax(-1).float())
    torch.testing.assert_close(sample.log_probs, found.log_probs)
    found.log_probs.sum().backward()
    gradients = [each.grad for each in policy.actor.parameters()]
    assert all(each is not None and bool(each.isfinite().all()) for each in gradients)


def test_the_other_kind_of_actions_is_refused_with_the_nearest_policy() -> None:
    with pytest.raises(ConfigError, match=r"gives discrete actions.* nearest: mlp"):
        CONFIG.build(env_spec())
    with pytest.raises(ConfigError, match=r"gives discrete actions.* or cnn for pictures"):
        CONFIGS["pictures"].build(env_spec())
    with pytest.raises(ConfigError, match="takes discrete ones; nearest: categorical_mlp"):
        MLPConfig().build(SPEC)
