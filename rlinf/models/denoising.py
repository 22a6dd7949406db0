"""What a policy that denoises its actions offers beside log-probs: a velocity, and where to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

TargetSpace = Literal["x0", "xnext"]

POINT, POINT_TIME = "point", "point_time"
"""Names in the inputs of a policy: where on the way from noise to action [N, H, A'], and at what
time [N], its velocity is asked for."""


@dataclass(frozen=True)
class FlowPoints:
    """A point for each of N rows between noise and what was done, where velocities are compared.

    What a velocity v predicts there is linear in it: the predictions of two velocities are
    ``scale`` times as far from each other as these are, and ``wanted`` predicts the target.

    Args:
        x: [N, H, A'].
        time: [N], 1 at the noise.
        wanted: [N, C, A], in the dimensions that are executed.
        scale: [N].
        std: [N] standard deviation of the denoising step from there; 0: it is not random.
    """

    x: Tensor
    time: Tensor
    wanted: Tensor
    scale: Tensor
    std: Tensor


class Denoising(Protocol):
    """A policy whose actions are denoised along a velocity."""

    def points(
        self, inputs: Mapping[str, Tensor], *, target: TargetSpace, resampled: bool
    ) -> FlowPoints:
        """Where to compare velocities, of rows as they were sampled, with the noise of the
        supervised loss in their inputs.

        Args:
            inputs: Observations, what ``sample`` kept, and noise, each [N, ...].
            target: What is predicted: the action that was done (x0), or, of points that the rollout
                passed, where its next step led (xnext).
            resampled: Noise the action that was done anew, up to a time at which the policy
                denoises, instead of taking a point that the rollout passed.
        """

    def velocity(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, C, A] at the points and times in the inputs, in the dimensions that are executed,
        with gradients. Called as the policy itself is, with ``velocity=True``."""
