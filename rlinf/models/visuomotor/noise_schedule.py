"""How much noise there is at each time of a diffusion, and steps to a time with less of it.

At time t noisy actions are √ᾱ_t a + √(1 − ᾱ_t) ε, of variance 1 − ᾱ_t. With a prediction of either
the noise ε or the actions a follow both. The random step to t' is the posterior given a (Ho et al.
2020, arXiv 2006.11239, eq. 6 and 7), the deterministic one goes to √ᾱ_t' a + √(1 − ᾱ_t') ε (Song et
al. 2020, arXiv 2010.02502, eq. 12 with σ = 0).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["squaredcos_cap_v2", "linear", "scaled_linear"]
Prediction = Literal["epsilon", "sample"]

_LARGEST = 0.999


def kept_shares(
    schedule: Schedule, times: int, *, first: float = 1e-4, last: float = 0.02
) -> Tensor:
    """[times] float32, ᾱ: the share of the variance that is no noise.

    Args:
        schedule: By the name that diffusers gives it: squared cosine (Nichol and Dhariwal 2021), or
            rates of noise, or their square roots, from the first to the last on a line.
        times: T.
        first: Rate of noise at time 0; not of the squared cosine.
        last: The same at T − 1.
    """
    if schedule == "linear":
        rates = torch.linspace(first, last, times)
    elif schedule == "scaled_linear":
        rates = torch.linspace(first**0.5, last**0.5, times).square()
    else:

        def kept(share: float) -> float:
            return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

        rates = torch.tensor([
            min(1 - kept((time + 1) / times) / kept(time / times), _LARGEST)
            for time in range(times)
        ])  # fmt: skip
    return (1.0 - rates).cumprod(dim=0)


def both_ends(
    prediction: Prediction, *, predicted: Tensor, x: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Actions and noise, both [B, H, A'], of which x [B, H, A'] with ᾱ ``kept`` [B] is made."""
    share = kept.view(-1, 1, 1)
    if prediction == "sample":
        return predicted, (x - share.sqrt() * predicted) / (1 - share).sqrt()
    return (x - (1 - share).sqrt() * predicted) / share.sqrt(), predicted


def posterior(*, actions: Tensor, x: Tensor, kept: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, H, A'] and deviation [B, 1, 1] of the random step from x, given what it is made of.

    Args:
        actions: [B, H, A'] without noise.
        x: [B, H, A'].
        kept: [B], ᾱ where x is.
        after: [B], ᾱ where it goes; 1 at the end, where nothing is random.
    """
    share, next_share = kept.view(-1, 1, 1), after.view(-1, 1, 1)
    ratio = share / next_share
    of_actions = next_share.sqrt() * (1 - ratio) / (1 - share)
    of_x = ratio.sqrt() * (1 - next_share) / (1 - share)
    variance = (1 - next_share) / (1 - share) * (1 - ratio)
    return of_actions * actions + of_x * x, variance.clamp(min=0).sqrt()


def mixed(*, actions: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
    """√ᾱ a + √(1 − ᾱ) ε, [B, H, A'], with ᾱ ``kept`` [B]: what is learnt from, and where the
    deterministic step goes."""
    share = kept.view(-1, 1, 1)
    return share.sqrt() * actions + (1 - share).sqrt() * noise
