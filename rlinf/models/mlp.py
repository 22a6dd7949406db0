"""Multi-layer perceptron policy for state observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.config import NormalizingPolicyConfig
from rlinf.models.gaussian import GaussianPolicy
from rlinf.models.policy import ObservationNormalizer

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class MLPPolicy(GaussianPolicy):
    """Normalised states into separate actor and critic trunks."""

    def __init__(
        self,
        config: NormalizingPolicyConfig,
        env_spec: EnvSpec,
        *,
        value_dim: int = 1,
        seed: int = 0,
    ) -> None:
        state_dim = states_dim(env_spec, needed_by=config.type)
        super().__init__(
            config,
            env_spec,
            feature_dim=state_dim,
            value_dim=value_dim,
            generator=torch.Generator().manual_seed(seed),
        )
        self.normalizer = normalizer_of(config, state_dim)

    def encode(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, D] states, normalised, for both trunks."""
        states = observations["states"]
        if self.normalizer is not None:
            states = self.normalizer(states)
        return states, states

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Take states [N, D] into the running statistics."""
        if self.normalizer is not None:
            self.normalizer.update(forward_inputs["states"])


def normalizer_of(config: NormalizingPolicyConfig, state_dim: int) -> ObservationNormalizer | None:
    """The normaliser of states [B, D] that a policy's section asks for."""
    if not config.normalize_observations:
        return None
    return ObservationNormalizer(state_dim, clip=config.observation_clip)


def states_dim(env_spec: EnvSpec, *, needed_by: str) -> int:
    """D of the ``states`` observation.

    Raises:
        ConfigError: the environment gives no state vector.
    """
    shape = env_spec.observation_shapes.get("states")
    if shape is None or len(shape) != 1:
        given = {name: tuple(shape) for name, shape in env_spec.observation_shapes.items()}
        raise ConfigError(
            f"model.type: {needed_by} reads the observation 'states' [D], but the environment "
            f"gives {given}; use cnn for images, or let the environment give states"
        )
    return int(shape[0])
