"""A module kept as a vector for each learning rate is trained as torch trains its parameters."""

import pytest
import torch

from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.modules import TrainedModules
from rlinf.trainers.ranks import Replicas

CONFIG = OptimizerConfig(lr=0.01, value_lr=0.03, weight_decay=0.1, max_grad_norm=None)


class Network(torch.nn.Module):
    """A policy and a critic, of which the values have a learning rate of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.critic = torch.nn.Linear(3, 2)
        self.policy = torch.nn.Linear(3, 4)

    def value_parameters(self):
        return self.critic.parameters()


def loss_of(network, step):
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    return network.policy(inputs).square().sum() + network.critic(inputs).exp().sum()


def kept(network, config=CONFIG):
    return TrainedModules({"it": network}, TrainerConfig(), Replicas(), optim={"it": config})


def train(modules, steps, **options):
    network = modules.modules["it"]
    for step in steps:
        modules.gradients(["it"], [step], lambda step: (loss_of(network, step), {"one": ONE}))
        modules.step(modules.norms(["it"]), factor=1.0 / (1 + step), **options)
    return modules


ONE = torch.ones(())


def test_it_equals_the_class_of_torch():
    expected, found = Network(), Network()
    common = {"betas": (CONFIG.beta1, CONFIG.beta2), "eps": CONFIG.eps, "weight_decay": 0.1}
    reference = torch.optim.AdamW(
        [
            {"params": list(expected.policy.parameters()), "lr": 0.01, "base": 0.01},
            {"params": list(expected.critic.parameters()), "lr": 0.03, "base": 0.03},
        ],
        **common,
    )
    for step in range(5):
        for group in reference.param_groups:
            group["lr"] = group["base"] / (1 + step)
        reference.zero_grad()
        loss_of(expected, step).backward()
        reference.step()
    train(kept(found), range(5))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_a_parameter_that_the_loss_does_not_depend_on_has_gradient_zero():
    network = Network()
    modules = kept(network)
    modules.gradients(["it"], [0], lambda _: (network.policy(torch.ones(1, 3)).sum(), {"one": ONE}))
    held = modules.held["it"]
    gradients = held.gather(held.gradients(), keep=True)
    assert gradients["policy.weight"].abs().sum() > 0
    assert torch.count_nonzero(gradients["critic.weight"]) == 0


def test_without_a_rate_of_their_own_values_have_that_of_the_rest():
    network = Network()
    train(kept(network, CONFIG.model_copy(update={"value_lr": None})), [0])
    assert (network.critic.weight - Network().critic.weight).abs().max() < 0.02


@pytest.mark.parametrize("cut", [1, 3])
def test_its_state_continues_it(cut):
    cut_off = train(kept(Network()), range(cut))
    continued = kept(Network())
    continued.load_state_dict(cut_off.state_dict(keep=True, copy=True))
    train(continued, range(cut, 5))
    whole = train(kept(Network()), range(5))
    for name, value in whole.modules["it"].state_dict().items():
        assert torch.equal(continued.modules["it"].state_dict()[name], value)


@pytest.mark.parametrize("value_lr", [0.03, None])
def test_steps_of_the_values_alone_are_none_of_the_rest(value_lr):
    config = CONFIG.model_copy(update={"value_lr": value_lr})
    both, whole, late = Network(), Network(), Network()
    warmed = train(kept(both, config), range(3), values_alone=True)
    assert torch.equal(both.policy.weight, Network().policy.weight)
    train(warmed, range(3, 6))
    train(kept(whole, config), range(6))
    train(kept(late, config), range(3, 6))
    torch.testing.assert_close(both.critic.state_dict(), whole.critic.state_dict())
    torch.testing.assert_close(both.policy.state_dict(), late.policy.state_dict())
