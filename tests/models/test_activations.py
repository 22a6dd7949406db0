"""The non-linearities against torch's own, value and gradient."""

from __future__ import annotations

import torch

from rlinf.models.actor_critic import tanh


def test_tanh_is_that_of_torch_up_to_rounding() -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([0.0, 1e-8, -1e-8, 1e4, -1e4])])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(tanh(x).sum(), x)
    (expected,) = torch.autograd.grad(torch.tanh(x).sum(), x)
    torch.testing.assert_close(tanh(x), torch.tanh(x), atol=2e-7, rtol=0.0)
    torch.testing.assert_close(gradient, expected, atol=4e-7, rtol=0.0)


def test_tanh_in_half_precision_is_rounded_once() -> None:
    x = torch.linspace(-3, 3, 4001, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(tanh(x), torch.tanh(x))


def test_tanh_is_the_same_with_and_without_gradients() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        acting = tanh(x)
    assert torch.equal(acting, tanh(x.clone().requires_grad_()).detach())
