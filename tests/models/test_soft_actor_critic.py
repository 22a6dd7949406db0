from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from rlinf.errors import ConfigError
from rlinf.models.config import SquashedMLPConfig
from rlinf.models.policy import ACTIONS, RAW_ACTIONS
from rlinf.models.soft_actor_critic import (
    QFunctions,
    SquashedMLPPolicy,
    Temperature,
    squash_correction,
)
from tests.models.test_policies import ACTION_DIM, STATE_DIM, env_spec, noise, observations

CONFIG = SquashedMLPConfig(
    hidden_sizes=(16,), q_hidden_sizes=(16, 8), num_action_chunks=2, policy_gain=1.0
)


def policy(config: SquashedMLPConfig = CONFIG) -> SquashedMLPPolicy:
    return SquashedMLPPolicy(config, env_spec(), seed=3)


def test_log_probs_are_those_of_the_transformed_gaussian() -> None:
    acting, seen, drawn = policy(), observations(32), noise(32, 2)
    actions, log_probs = acting.act(seen, drawn)
    mean, log_std = acting._distribution(acting.encode(seen))
    inner = mean.double() + log_std.double().exp() * drawn
    scaled = torch.tanh(inner)
    normal = Normal(mean.double(), log_std.double().exp())
    squashed = TransformedDistribution(normal, [TanhTransform()])
    expected = squashed.log_prob(scaled).flatten(1).sum(1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-3)
    scaled = scaled.float()
    half = torch.tensor([1.0, 0.5, 2.0])
    torch.testing.assert_close(actions, scaled * half)


def test_the_density_over_the_box_integrates_to_one() -> None:
    config = SquashedMLPConfig(hidden_sizes=(4,), q_hidden_sizes=(4,), initial_log_std=-0.5)
    spec = env_spec(action_dim=1, action_low=(-3.0,), action_high=(1.0,))
    acting = SquashedMLPPolicy(config, spec, seed=0)
    points = 20_001
    scaled = torch.linspace(-0.999999, 0.999999, points)
    seen = {"states": observations(1)["states"].expand(points, STATE_DIM)}
    actions = (scaled * 2.0 - 1.0).view(points, 1, 1)
    found = acting.evaluate_actions(seen | {RAW_ACTIONS: actions})
    density = found.log_probs.detach().flatten().exp()
    assert float(torch.trapezoid(density, scaled)) == pytest.approx(1.0, abs=2e-3)


def test_acting_and_evaluating_agree_and_actions_stay_in_the_box() -> None:
    acting, seen = policy(), observations(64)
    sample = acting.sample(seen, {ACTIONS: 5 * noise(64, 2)})
    low, high = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([1.0, 0.5, 2.0])
    assert bool(((sample.actions >= low) & (sample.actions <= high)).all())
    again = acting.evaluate_actions(seen | sample.forward_inputs)
    torch.testing.assert_close(again.log_probs, sample.log_probs)
    assert bool(again.log_probs.isfinite().all())
    mode = acting.sample(seen, None).actions
    mean, _ = acting._distribution(acting.encode(seen))
    torch.testing.assert_close(mode, high * torch.tanh(mean))


def test_the_correction_is_finite_where_one_minus_tanh_squared_is_zero() -> None:
    inner = torch.tensor([-60.0, -1.0, 0.0, 2.0, 60.0])
    expected = torch.log1p(-torch.tanh(inner.double()).square())
    found = squash_correction(inner)
    torch.testing.assert_close(found[1:4].double(), expected[1:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0], torch.tensor(2 * (math.log(2) - 60.0)))
    torch.testing.assert_close(found[4], found[0])


def test_gradients_flow_through_actions_and_log_probs() -> None:
    acting = policy()
    actions, log_probs = acting.act(observations(8), noise(8, 2))
    (actions.sum() + log_probs.sum()).backward()
    assert all(bool(p.grad is not None and p.grad.abs().sum() > 0) for p in acting.parameters())


def test_an_untrained_policy_has_the_configured_deviation() -> None:
    config = SquashedMLPConfig(hidden_sizes=(16,), initial_log_std=-1.0, policy_gain=1e-6)
    acting = policy(config)
    _, log_std = acting._distribution(acting.encode(observations(4)))
    torch.testing.assert_close(log_std, torch.full_like(log_std, -1.0), rtol=0, atol=1e-3)


def test_q_functions_equal_perceptrons_of_their_own() -> None:
    functions = QFunctions(CONFIG, env_spec(), seed=2)
    seen, actions = observations(6), noise(6, 2)
    values = functions(seen, actions)
    assert values.shape == (2, 6)
    scaled = actions / torch.tensor([1.0, 0.5, 2.0])
    for head in range(2):
        x = torch.cat([seen["states"], scaled.flatten(1)], dim=1)
        layers = list(zip(functions.weights, functions.biases, strict=True))
        for number, (weight, bias) in enumerate(layers):
            x = x @ weight[head] + bias[head]
            x = x if number == len(layers) - 1 else torch.relu(x)
        torch.testing.assert_close(values[head], x[:, 0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(values[0], values[1])
    again = QFunctions(CONFIG, env_spec(), seed=2)
    assert all(
        torch.equal(a, b) for a, b in zip(functions.parameters(), again.parameters(), strict=True)
    )


def test_temperature_begins_where_it_is_told() -> None:
    assert Temperature(0.25)().item() == pytest.approx(0.25)


def test_actions_without_bounds_are_refused() -> None:
    spec = env_spec(action_low=(-math.inf,) * ACTION_DIM)
    for made in (SquashedMLPPolicy, QFunctions):
        with pytest.raises(ConfigError, match=r"dimension 0 of .* actions goes from -inf to 1;"):
            made(CONFIG, spec)


def test_an_action_that_can_only_be_one_number_is_refused() -> None:
    low = (-1.0,) * (ACTION_DIM - 1) + (0.5,)
    spec = env_spec(action_low=low, action_high=(0.5,) * ACTION_DIM)
    for made in (SquashedMLPPolicy, QFunctions):
        with pytest.raises(ConfigError, match=f"dimension {ACTION_DIM - 1} .* only be 0.5"):
            made(CONFIG, spec)
