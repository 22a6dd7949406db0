"""Diagonal Gaussian over action chunks: separate actor and critic trunks, on states or features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.actor_critic import ActorCriticPolicy, ReadsStates, told_tasks
from rlinf.models.config import LOG_STD_RANGE, GaussianPolicyConfig
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, ActionEvaluation, ActionSample

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def gaussian_log_prob(*, deviation: Tensor, log_std: Tensor) -> Tensor:
    """log N at ``deviation`` z = (action − mean) / σ: −½z² − log σ − ½ log 2π, elementwise."""
    return torch.addcmul(-_HALF_LOG_TWO_PI - log_std, deviation, deviation, value=-0.5)


def gaussian_entropy(*, log_std: Tensor) -> Tensor:
    """½ + ½ log 2π + log σ of each dimension, in nats."""
    return log_std + (0.5 + _HALF_LOG_TWO_PI)


class GaussianPolicy(ActorCriticPolicy):
    """Base of the Gaussian policies: a subclass says how observations become features.

    The environment gets actions clipped to its box; log-probs belong to the raw actions, so the
    density is that of the Gaussian and the clipping is part of the environment.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        config: GaussianPolicyConfig,
        env_spec: EnvSpec,
        *,
        feature_dim: int,
        value_dim: int,
        generator: torch.Generator,
        critic_dim: int | None = None,
    ) -> None:
        if env_spec.action_kind != "continuous":
            discrete = "categorical_mlp, categorical_cnn for pictures"
            if config.q_implementation is not None:
                discrete = "task: embodied with algorithm ppo and the model categorical_mlp"
            raise ConfigError(
                f"model.type: {config.type} gives continuous actions, the environment takes "
                f"{env_spec.action_kind} ones; nearest: {discrete}, or an environment with a Box "
                "action space"
            )
        outputs = config.num_action_chunks * env_spec.action_dim
        super().__init__(
            config,
            env_spec,
            outputs=outputs * (2 if config.state_dependent_std else 1),
            feature_dim=feature_dim,
            value_dim=value_dim,
            generator=generator,
            critic_dim=critic_dim,
        )
        self._state_dependent_std = config.state_dependent_std
        self._initial_log_std = config.initial_log_std
        self._std_tasks = told_tasks(env_spec) if config.task_dependent_std else 0
        if config.task_dependent_std and not self._std_tasks:
            raise ConfigError(
                "model.task_dependent_std: the environment has one task, and so one standard "
                "deviation of each action; leave the key out"
            )
        if not config.state_dependent_std:
            shape = (self.chunk, self.action_dim)
            shape = (self._std_tasks, outputs) if self._std_tasks else shape
            self.log_std = torch.nn.Parameter(torch.full(shape, config.initial_log_std))
        for name in ("action_low", "action_high"):
            bound = torch.as_tensor(getattr(env_spec, name), dtype=torch.float32)
            self.register_buffer(name, bound.expand(self.action_dim).clone(), persistent=False)

    def _distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, C, A] and log-std, [C, A] or [B, C, A]."""
        output = self.actor(features)
        shape = (len(features), self.chunk, self.action_dim)
        if self._std_tasks:
            told = features[:, -self._std_tasks :]
            return output.view(shape), (told @ self.log_std).view(shape)
        if not self._state_dependent_std:
            return output.view(shape), self.log_std
        mean, log_std = output.chunk(2, dim=-1)
        log_std = (log_std + self._initial_log_std).clamp(*LOG_STD_RANGE)
        return mean.reshape(shape), log_std.reshape(shape)

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act, without gradients; see :meth:`Policy.sample`."""
        mean, log_std = self._distribution(self.encode(observations))
        # The deviation of the raw action in standard deviations is the noise itself.
        deviation = torch.zeros_like(mean) if noise is None else noise[ACTIONS]
        raw_actions = mean if noise is None else torch.addcmul(mean, log_std.exp(), deviation)
        return ActionSample(
            actions=raw_actions.clamp(self.action_low, self.action_high),
            log_probs=gaussian_log_prob(deviation=deviation, log_std=log_std),
            forward_inputs={RAW_ACTIONS: raw_actions},
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions; see the base class."""
        features = self.encode(forward_inputs)
        mean, log_std = self._distribution(features)
        deviation = (forward_inputs[RAW_ACTIONS] - mean) * (-log_std).exp()
        return ActionEvaluation(
            log_probs=gaussian_log_prob(deviation=deviation, log_std=log_std),
            values=self._values(self.critic_features(forward_inputs, features)),
            entropy=gaussian_entropy(log_std=log_std).expand_as(mean),
        )

    def mode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, C, A] most likely actions, not clipped, with gradients."""
        return self._distribution(self.encode(observations))[0]


class MLPPolicy(ReadsStates, GaussianPolicy):
    """Gaussian actions."""
