"""Gaussian policy on random Fourier features of the states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.envs.spec import EnvSpec
from rlinf.models.actor_critic import states_dim
from rlinf.models.gaussian import GaussianPolicy
from rlinf_example.fourier_config import FourierConfig


class FourierPolicy(GaussianPolicy):
    """States [B, D] into sin and cos of random projections, then the trunks of every policy."""

    frequencies: Tensor

    def __init__(
        self, config: FourierConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            config,
            env_spec,
            feature_dim=2 * config.frequencies,
            value_dim=value_dim,
            generator=generator,
        )
        shape = (states_dim(env_spec, needed_by="fourier"), config.frequencies)
        self.register_buffer(
            "frequencies", config.bandwidth * torch.randn(shape, generator=generator)
        )

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, 2F] features, which actor and critic read."""
        phases = observations["states"] @ self.frequencies
        return torch.cat([phases.sin(), phases.cos()], dim=-1)

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Sine and cosine are bounded already."""
