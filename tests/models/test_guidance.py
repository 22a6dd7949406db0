"""Guided flows, where everything is known: Gaussian chunks, whose velocity is linear."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlinf.models.guidance import guided_velocity

HORIZON, STEPS = 12, 20
MEAN = torch.linspace(0.0, 1.0, HORIZON)
_TIMES = torch.arange(HORIZON)
COVARIANCE = torch.exp(-(_TIMES[:, None] - _TIMES[None]).abs() / 6.0).double()
"""Neighbouring actions are alike."""


def slope(time: float) -> Tensor:
    """[H, H] derivative of the velocity by x: E[ε − a | x] is linear in x."""
    eye = torch.eye(HORIZON, dtype=torch.float64)
    of_x = time**2 * eye + (1 - time) ** 2 * COVARIANCE
    return torch.linalg.solve(of_x, time * eye - (1 - time) * COVARIANCE).T.float()


def velocity(x: Tensor, time: float) -> Tensor:
    """[B, H, A], the same for each action dimension."""
    mean = MEAN.unsqueeze(-1)
    return torch.einsum("ij,bja->bia", slope(time), x - (1 - time) * mean) - mean


def denoised(start: Tensor, prefix: Tensor, weights: Tensor, most: float = 5.0) -> Tensor:
    x = start
    for step in range(STEPS):
        time = 1 - step / STEPS
        x = x - guided_velocity(
            lambda at, time=time: velocity(at, time),
            x=x, time=time, prefix=prefix, weights=weights, most=most,
        ) / STEPS  # fmt: skip
    return x


@pytest.mark.parametrize("time", [1.0, 0.9, 0.5, 0.1])
def test_the_change_is_that_of_the_paper(time: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, prefix = torch.randn(2, 3, HORIZON, 2, generator=generator)
    weights = torch.rand(3, HORIZON, generator=generator)
    found = guided_velocity(lambda at: velocity(at, time), x=x, time=time, prefix=prefix,
                            weights=weights)  # fmt: skip
    plain = velocity(x, time)
    jacobian = torch.eye(HORIZON) - time * slope(time)
    tau = 1 - time
    if tau:
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        scale = min(5.0, (1 - tau) / (tau * r2))
    else:
        scale = 5.0
    error = weights.unsqueeze(-1) * (prefix - (x - time * plain))
    wanted = plain - scale * torch.einsum("ji,bja->bia", jacobian, error)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


def test_a_guided_chunk_begins_with_the_prefix_and_stays_smooth() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(64, HORIZON, 1, generator=generator)
    other = denoised(torch.randn(64, HORIZON, 1, generator=generator), start, torch.zeros(64, 12))
    weights = torch.zeros(64, HORIZON)
    weights[:, :4] = 1.0
    weights[:, 4:8] = torch.tensor([0.6, 0.35, 0.15, 0.05])
    free, guided = denoised(start, other, 0 * weights), denoised(start, other, weights)
    far, near = ((each - other)[:, :4].square().mean() for each in (free, guided))
    assert near < 0.05 * far
    # The prefix pulls what comes after it along: no jump where the weights end.
    jumps = (guided[:, 1:] - guided[:, :-1]).square().mean((0, 2))
    expected = 2 - 2 * COVARIANCE[0, 1]
    assert float(jumps.max()) < 3 * float(expected)


def test_without_weights_nothing_changes() -> None:
    x = torch.randn(2, HORIZON, 1, generator=torch.Generator().manual_seed(2))
    found = guided_velocity(lambda at: velocity(at, 0.5), x=x, time=0.5, prefix=x,
                            weights=torch.zeros(2, HORIZON))  # fmt: skip
    torch.testing.assert_close(found, velocity(x, 0.5), rtol=0, atol=0)


def test_at_the_noise_end_the_weight_is_its_bound() -> None:
    """Where the velocity is 0 the actions are x, and the weight of equation 2 has no bound."""
    x, prefix = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    bent = guided_velocity(
        lambda at: 0.0 * at,
        x=x,
        time=1.0,
        prefix=prefix,
        weights=torch.tensor([[1.0, 0.5]]),
        most=4.0,
    )
    torch.testing.assert_close(bent, torch.tensor([-4.0, -2.0]).view(1, 2, 1).expand(1, 2, 3))
