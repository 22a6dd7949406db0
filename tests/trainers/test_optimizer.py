"""The optimizer over vectors equals torch's over parameters."""

import pytest
import torch

from rlinf.trainers.config import OptimizerConfig
from rlinf.trainers.flat_parameters import FlatParameters
from rlinf.trainers.optimizer import VectorAdamW

CONFIG = OptimizerConfig(lr=0.01, value_lr=0.03, weight_decay=0.1)


def networks():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4), torch.nn.Linear(3, 2)


def loss_of(policy, critic, step):
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    return policy(inputs).square().sum() + critic(inputs).exp().sum()


def flat_training(steps):
    policy, critic = networks()
    flat = FlatParameters([list(policy.parameters()), list(critic.parameters())])
    optimizer = VectorAdamW(flat.vectors, CONFIG)
    for step in steps:
        optimizer.set_factor(1.0 / (1 + step))
        optimizer.step(flat.by_group(flat.gradient(loss_of(policy, critic, step))))
    return policy, critic, optimizer


def test_it_equals_the_class_of_torch():
    policy, critic = networks()
    common = {"betas": (CONFIG.beta1, CONFIG.beta2), "eps": CONFIG.eps, "weight_decay": 0.1}
    reference = torch.optim.AdamW(
        [
            {"params": list(policy.parameters()), "lr": 0.01, "base": 0.01},
            {"params": list(critic.parameters()), "lr": 0.03, "base": 0.03},
        ],
        **common,
    )
    for step in range(5):
        for group in reference.param_groups:
            group["lr"] = group["base"] / (1 + step)
        reference.zero_grad()
        loss_of(policy, critic, step).backward()
        reference.step()
    found = flat_training(range(5))
    for expected, network in zip((policy, critic), found[:2], strict=True):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_a_parameter_that_the_loss_does_not_depend_on_has_gradient_zero():
    policy, critic = networks()
    flat = FlatParameters([list(policy.parameters()), list(critic.parameters())])
    of_policy, of_critic = flat.by_group(flat.gradient(policy(torch.ones(1, 3)).sum()))
    assert of_policy.abs().sum() > 0
    assert torch.count_nonzero(of_critic) == 0


def test_an_empty_group_is_left_alone():
    policy, _ = networks()
    flat = FlatParameters([list(policy.parameters()), []])
    before = policy.weight.detach().clone()
    optimizer = VectorAdamW(flat.vectors, CONFIG)
    optimizer.step(flat.by_group(flat.gradient(policy(torch.ones(1, 3)).sum())))
    assert not torch.equal(policy.weight, before)


@pytest.mark.parametrize("cut", [1, 3])
def test_its_state_continues_it(cut):
    policy, critic, optimizer = flat_training(range(cut))
    saved = {k: {n: t.clone() for n, t in v.items()} for k, v in optimizer.state_dict().items()}
    flat = FlatParameters([list(policy.parameters()), list(critic.parameters())])
    continued = VectorAdamW(flat.vectors, CONFIG)
    continued.load_state_dict(saved)
    for step in range(cut, 5):
        continued.set_factor(1.0 / (1 + step))
        continued.step(flat.by_group(flat.gradient(loss_of(policy, critic, step))))
    whole = flat_training(range(5))
    assert torch.equal(policy.weight, whole[0].weight)
    assert torch.equal(critic.weight, whole[1].weight)
