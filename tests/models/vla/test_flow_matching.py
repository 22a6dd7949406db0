from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, Normal

from rlinf.models.vla.flow_matching import (
    Method,
    noisy_actions,
    spread_of,
    squashed_std,
    training_time,
    transition,
)

MEAN, STD = 0.7, 0.5


def analytic_velocity(x: Tensor, t: Tensor) -> Tensor:
    """E[ε − a | x_t] for a ~ N(MEAN, STD²) and ε ~ N(0, 1)."""
    t = t.reshape(-1, 1, 1)
    spread = t**2 + (1 - t) ** 2 * STD**2
    return -MEAN + (t - (1 - t) * STD**2) * (x - (1 - t) * MEAN) / spread


def final(method: Method, steps: int, level: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8_000, 1, 1, generator=generator, dtype=torch.float64)
    for step in range(steps):
        time = torch.tensor([1 - step / steps], dtype=torch.float64)
        mean, std = transition(
            method, x=x, velocity=analytic_velocity(x, time), time=time, steps=steps,
            noise_level=level,
        )  # fmt: skip
        x = mean + std * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x


@pytest.mark.parametrize("method", ["ode", "flow_sde"])
def test_marginals_are_those_of_the_data(method: Method) -> None:
    found = final(method, 100)
    assert found.mean().item() == pytest.approx(MEAN, abs=0.02)
    assert found.std().item() == pytest.approx(STD, abs=0.02)


def test_an_ode_step_is_an_euler_step() -> None:
    x, velocity = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    mean, std = transition("ode", x=x, velocity=velocity, time=torch.full((5,), 0.4).double(),
                           steps=10)  # fmt: skip
    torch.testing.assert_close(mean, x - velocity / 10)
    assert not std.any()


@pytest.mark.parametrize("time", [1.0, 0.5, 0.25])
def test_flow_sde_is_the_euler_maruyama_step_of_its_equation(time: float) -> None:
    steps, level = 4, 0.6
    x, velocity = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    mean, std = transition(
        "flow_sde", x=x, velocity=velocity, time=torch.full((5,), time).double(), steps=steps,
        noise_level=level,
    )  # fmt: skip
    sigma = level * math.sqrt(time / (1 - min(time, 1 - 1 / steps)))
    drift = velocity + sigma**2 / (2 * time) * (x + (1 - time) * velocity)
    torch.testing.assert_close(mean, x - drift / steps)
    torch.testing.assert_close(std.expand_as(x), torch.full_like(x, sigma / math.sqrt(steps)))


def test_flow_cps_keeps_the_share_of_noise() -> None:
    """cos² + sin² = 1: at the noise end the variance after a step is that of the ODE."""
    x, velocity = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    time = torch.full((5,), 0.75).double()
    mean, std = transition("flow_cps", x=x, velocity=velocity, time=time, steps=4, noise_level=0.3)
    action, noise = x - 0.75 * velocity, x + 0.25 * velocity
    of_noise = (mean - 0.5 * action) / noise
    torch.testing.assert_close(of_noise**2 + std**2, torch.full_like(x, 0.5**2))
    assert std[0, 0, 0].item() == pytest.approx(0.5 * math.sin(0.15 * math.pi))


def test_flow_noise_has_the_mean_of_the_ode() -> None:
    x, velocity = torch.randn(2, 5, 4, 3)
    given = {"x": x, "velocity": velocity, "time": torch.full((5,), 0.75), "steps": 4}
    assert torch.equal(transition("flow_noise", **given)[0], transition("ode", **given)[0])


def test_times_of_several_rows_are_their_own() -> None:
    x, velocity = torch.randn(2, 3, 4, 2)
    times = torch.tensor([1.0, 0.75, 0.25])
    together = transition("flow_sde", x=x, velocity=velocity, time=times, steps=4)
    for row in range(3):
        alone = transition("flow_sde", x=x[row : row + 1], velocity=velocity[row : row + 1],
                           time=times[row], steps=4)  # fmt: skip
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[row : row + 1], other)


def test_log_probs_are_those_of_torch() -> None:
    x, mean = torch.randn(2, 5, 4, 3)
    std = torch.rand(5, 4, 3) + 0.1
    torch.testing.assert_close(spread_of(std).log_prob(x, mean), Normal(mean, std).log_prob(x))
    torch.testing.assert_close(spread_of(std).entropy(), Normal(mean, std).entropy())
    std[:, 0] = 0
    std.requires_grad_()
    spread = spread_of(std)
    found = spread.log_prob(x, mean) + spread.entropy()
    assert not found[:, 0].any()
    found.sum().backward()
    assert std.grad is not None
    assert std.grad.isfinite().all()


def test_learned_deviation_stays_between_its_bounds() -> None:
    found = squashed_std(torch.tensor([-50.0, 0.0, 50.0]), (0.08, 0.16))
    torch.testing.assert_close(found, torch.tensor([0.08, math.sqrt(0.08 * 0.16), 0.16]))


def test_training_times_are_beta() -> None:
    uniform = torch.linspace(0, 1, 10_001)[:-1] + 5e-5
    beta = (training_time(uniform) - 0.001) / 0.999
    # The mean of Beta(1.5, 1) is 0.6 and its density 1.5 √t.
    assert beta.mean().item() == pytest.approx(0.6, abs=1e-3)
    torch.testing.assert_close(
        Beta(1.5, 1.0).log_prob(beta[1:]).exp(), 1.5 * beta[1:].sqrt(), atol=1e-4, rtol=1e-4
    )
    assert (beta < 0.25).float().mean().item() == pytest.approx(0.25**1.5, abs=1e-3)


def test_what_is_learned_is_the_way_from_noise_to_action() -> None:
    actions, noise = torch.randn(2, 5, 4, 3)
    x, velocity = noisy_actions(actions, noise, torch.full((5,), 0.3))
    torch.testing.assert_close(x - 0.3 * velocity, actions)
    torch.testing.assert_close(x + 0.7 * velocity, noise)
