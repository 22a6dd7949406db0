"""Flow matching as a policy: denoising steps that are Gaussian transitions, and their log-probs.

A velocity v = ε − a carries noise x_1 = ε at time t = 1 to an action x_0 = a at t = 0 along
x_t = t ε + (1 − t) a. In K steps t_k = 1 − k / K. From v follow both ends, x̂0 = x − t v (action)
and x̂1 = x + (1 − t) v (noise), and each method weighs them otherwise and adds its own noise
(πRL, https://arxiv.org/abs/2510.25889):

========== ============ ========================== ==============================
method     weight of x̂0 weight of x̂1               standard deviation
========== ============ ========================== ==============================
ode        1 − t'       t'                         0
flow_sde   1 − t'       t' − σ² δ / (2 t)          σ √δ, σ = a √(t / (1 − t))
flow_noise 1 − t'       t'                         learned
flow_cps   1 − t'       t' cos(π a / 2)            t' sin(π a / 2)
========== ============ ========================== ==============================

with δ = 1 / K, t' = t − δ and noise level a; at t = 1 the denominator of σ has t_1. Flow-SDE keeps
the marginals of the ODE: in reverse time dx = [v + σ² / (2 t) (x + (1 − t) v)] dt + σ dw.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Method = Literal["ode", "flow_sde", "flow_noise", "flow_cps"]


def transition_weights(
    method: Method, time: Tensor, *, steps: int, noise_level: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """What x and the velocity v weigh in the mean at time − 1 / steps, and the standard deviation
    there (not that of Flow-Noise), each of the shape of the times.

    Both ends are linear in x and v: with the weights w₀ of x̂0 and w₁ of x̂1 the mean is
    (w₀ + w₁) x + (w₁ (1 − t) − w₀ t) v.

    Args:
        method: See the module.
        time: t.
        steps: K.
        noise_level: a.
    """
    delta = 1.0 / steps
    after = time - delta
    of_action, of_noise, std = 1.0 - after, after, torch.zeros_like(time)
    if method == "flow_sde":
        variance = noise_level**2 * time / (1.0 - time.clamp(max=1.0 - delta))
        of_noise, std = after - variance * delta / (2.0 * time), (variance * delta).sqrt()
    elif method == "flow_cps":
        angle = math.pi * noise_level / 2.0
        of_noise, std = after * math.cos(angle), after * math.sin(angle)
    return of_action + of_noise, of_noise * (1.0 - time) - of_action * time, std


def transition(
    method: Method,
    *,
    x: Tensor,
    velocity: Tensor,
    time: Tensor,
    steps: int,
    noise_level: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Mean [B, H, A] of x at time − 1 / steps, and its standard deviation [B, 1, 1].

    Args:
        method: See the module.
        x: [B, H, A].
        velocity: [B, H, A] at x.
        time: [B] or one for all.
        steps: K.
        noise_level: a.
    """
    of_x, of_velocity, std = transition_weights(
        method, time.reshape(-1, 1, 1), steps=steps, noise_level=noise_level
    )
    return torch.addcmul(of_x * x, of_velocity, velocity), std


class Spread(NamedTuple):
    """What log-probs and entropy of Gaussian steps are made of, of the size of their deviation s,
    which often is one number for a whole step. All of it is 0 where nothing is random (s = 0)."""

    inverse: Tensor
    """1 / s."""
    at_mean: Tensor
    """−½ log(2 π s²), the log-density of each element there."""

    def log_prob(self, x: Tensor, mean: Tensor) -> Tensor:
        """log N(x; mean, s²) of each element."""
        deviation = (x - mean) * self.inverse
        return torch.addcmul(self.at_mean, deviation, deviation, value=-0.5)

    def entropy(self) -> Tensor:
        """½ log(2 π e s²) of each element, in nats."""
        return torch.where(self.inverse > 0, 0.5 - self.at_mean, 0.0)


def spread_of(std: Tensor) -> Spread:
    """What a standard deviation gives."""
    random = std > 0
    safe = torch.where(random, std, 1.0)
    at_mean = -0.5 * math.log(2.0 * math.pi) - safe.log()
    return Spread(torch.where(random, safe.reciprocal(), 0.0), torch.where(random, at_mean, 0.0))


def standard_log_prob(x: Tensor) -> Tensor:
    """log N(x; 0, 1) of each element."""
    return -0.5 * (x.square() + math.log(2.0 * math.pi))


def squashed_std(raw: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Standard deviation of Flow-Noise between ``bounds``, whose log variance is a scaled tanh."""
    low, high = (2.0 * math.log(bound) for bound in bounds)
    return (0.5 * (low + (high - low) * (torch.tanh(raw) + 1.0) / 2.0)).exp()


def training_time(uniform: Tensor) -> Tensor:
    """Times to learn at, from uniform numbers in [0, 1): 0.001 + 0.999 · Beta(1.5, 1).

    The distribution function of Beta(1.5, 1) is t^1.5: more is learned near the noise.
    """
    return 0.001 + 0.999 * uniform.pow(1.0 / 1.5)


def noisy_actions(actions: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """x_t and the velocity that is to be learned there, both [B, H, A], at times [B]."""
    t = time.reshape(-1, 1, 1)
    return t * noise + (1.0 - t) * actions, noise - actions


class NoiseHead(nn.Module):
    """What the deviation of Flow-Noise is made of, from hidden states of the expert."""

    def __init__(self, width: int, action_dim: int, *, seed: int) -> None:
        super().__init__()
        widths = (width, 128, 64, action_dim)
        self.layers = nn.ModuleList(
            nn.Linear(rows, columns, device="meta") for rows, columns in pairwise(widths)
        )
        self.to_empty(device="cpu")
        fill_fresh(self, torch.Generator().manual_seed(seed + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H, W] to [B, H, A]."""
        x = hidden.to(next(self.parameters()).dtype)
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        raw: Tensor = self.layers[-1](x)
        return raw


@torch.no_grad()
def fill_fresh(module: nn.Module, generator: torch.Generator) -> None:
    """Fresh weights: matrices of variance 1 / inputs; norms and adaptive ones begin as identity."""
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    norms = {id(part.weight) for part in module.modules() if isinstance(part, kinds)}
    for name, parameter in module.named_parameters():
        adaptive = ".dense." in name
        if parameter.ndim > 1 and not adaptive:
            of_rows = "embed" in name and parameter.ndim == 2
            of_kinds = parameter.ndim == 3  # a matrix [inputs, outputs] for each of several kinds
            inputs = parameter.shape[1] if of_rows or of_kinds else parameter[0].numel()
            parameter.normal_(0.0, inputs**-0.5, generator=generator)
        else:
            parameter.fill_(float(id(parameter) in norms))
            if adaptive and parameter.ndim == 1:
                parameter[-len(parameter) // 3 :] = 1.0  # the gates are open
