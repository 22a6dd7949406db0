"""Guidance of a flow model towards actions that are committed already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def guided_velocity(
    velocity: Callable[[Tensor], Tensor],
    *,
    x: Tensor,
    time: float,
    prefix: Tensor,
    weights: Tensor,
    most: float = 5.0,
) -> Tensor:
    """The velocity at x, bent so that the chunk at the end of the flow begins with ``prefix``.

    With x_t = t ε + (1 − t) a, from noise at t = 1 to actions at t = 0, and v = ε − a, the actions
    that x leads to are â = x − t v(x). The velocity is changed by
    −min(most, ((1 − t)² + t²) / (t (1 − t))) · (∂â/∂x)ᵀ diag(weights) (prefix − â): equations 2
    to 4 of Black, Galliker and Levine, Real-Time Execution of Action Chunking Flow Policies
    (2025), https://arxiv.org/abs/2506.07339, whose time τ is 1 − t.

    Args:
        velocity: [B, H, A] of x; a graph is built through it, so that nothing that it reads may
            come from ``torch.inference_mode``.
        x: [B, H, A].
        time: t in (0, 1].
        prefix: [B, H, A] in the units of the model; where a weight is 0 it does not matter.
        weights: [B, H] in [0, 1].
        most: Bound of the guidance weight; too large a one makes few denoising steps diverge.
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        found = velocity(leaf)
        actions = leaf - time * found
        error = (weights.unsqueeze(-1) * (prefix - actions)).detach()
        (change,) = torch.autograd.grad(actions, leaf, error)
    rest = time * (1.0 - time)
    scale = most if rest == 0 else min(most, ((1.0 - time) ** 2 + time**2) / rest)
    return found.detach() - scale * change
