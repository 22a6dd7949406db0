from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rlinf.algorithms.base_config import KLType
from rlinf.algorithms.losses import kl_estimate

POLICY = Normal(torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64))
REFERENCE = Normal(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))


@pytest.mark.parametrize("kl_type", ["k1", "k3", "low_var_kl"])
def test_unbiased_estimators_integrate_to_the_divergence(kl_type: KLType) -> None:
    """E_p[estimate] by quadrature over the policy's density, against the closed form."""
    x = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    log_p, log_q = POLICY.log_prob(x), REFERENCE.log_prob(x)
    estimate = kl_estimate(log_probs=log_p, reference_log_probs=log_q, kl_type=kl_type)
    expectation = torch.trapezoid(estimate * log_p.exp(), x)
    torch.testing.assert_close(expectation, kl_divergence(POLICY, REFERENCE), rtol=1e-5, atol=1e-6)


def test_mean_gradients_are_those_of_the_divergences_and_of_k1_nothing() -> None:
    log_q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()

    def gradient(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(loss_of(logits.log_softmax(0)).sum(), logits)[0]

    def mean_gradient(kl_type: KLType) -> torch.Tensor:
        return gradient(
            lambda log_p: (
                log_p.exp().detach()
                * kl_estimate(log_probs=log_p, reference_log_probs=log_q, kl_type=kl_type)
            )
        )

    forward = gradient(lambda log_p: log_p.exp() * (log_p - log_q))
    backward = gradient(lambda log_p: log_q.exp() * (log_q - log_p))
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros_like(forward))
    torch.testing.assert_close(mean_gradient("k2"), forward)
    torch.testing.assert_close(mean_gradient("k3"), backward)


def test_values_by_hand() -> None:
    log_p, log_q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])

    def estimate(kl_type: KLType) -> list[float]:
        return kl_estimate(log_probs=log_p, reference_log_probs=log_q, kl_type=kl_type).tolist()

    assert estimate("k1") == [0.5, -1.0]
    assert estimate("abs") == [0.5, 1.0]
    assert estimate("k2") == [0.125, 0.5]
    # exp(d) − d − 1 with d = −0.5 and d = 1
    assert estimate("k3") == pytest.approx([0.1065306597, 0.7182818285])
    assert estimate("low_var_kl") == estimate("k3")


def test_k3_is_bounded_for_distant_policies() -> None:
    far = torch.tensor([0.0, -1000.0])
    estimate = kl_estimate(log_probs=far, reference_log_probs=far.flip(0), kl_type="k3")
    assert estimate.tolist() == [10.0, 10.0]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'full'"):
        kl_estimate(
            log_probs=torch.zeros(1),
            reference_log_probs=torch.zeros(1),
            kl_type="full",  # type: ignore[arg-type]
        )
