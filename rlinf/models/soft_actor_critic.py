"""The networks of soft actor-critic: squashed Gaussian policy, Q functions, temperature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import (
    ACTIVATIONS,
    normalizer_of,
    states_dim,
    told_tasks,
    with_task,
)
from rlinf.models.config import LOG_STD_RANGE, SquashedConfig, SquashedMLPConfig
from rlinf.models.gaussian import MLPPolicy, gaussian_log_prob
from rlinf.models.policy import (
    ACTIONS,
    RAW_ACTIONS,
    ActionEvaluation,
    ActionSample,
    of_own_dimensions,
    owned,
)

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_LOG_TWO = math.log(2.0)
_NEAR_BOUND = 1.0 - 1e-6
"""How near to a bound of the box the density is evaluated: atanh of the bound is infinite."""


class SquashedMLPPolicy(MLPPolicy):
    """a = centre + radius · tanh(u), u Gaussian (Haarnoja et al. 2018, appendix C).

    Log-probs are densities over the box scaled to [−1, 1], whatever the units of the actions:
    log p = log N(u) − log(1 − tanh² u). Actions never leave the box, so the raw actions are those
    that the environments execute.
    """

    centre: Tensor
    radius: Tensor

    def __init__(
        self, config: SquashedMLPConfig, env_spec: EnvSpec, *, value_dim: int = 0, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        register_box(self, config, env_spec)

    def _distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-std [B, C, A] of u; the second bounded smoothly, so that it never sticks."""
        mean, spread = self.actor(features).chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        # Shifted so that an untrained policy has the configured one.
        at = (self._initial_log_std - low) / (high - low)
        shift = math.atanh(max(-_NEAR_BOUND, min(_NEAR_BOUND, 2 * at - 1)))
        log_std = low + 0.5 * (high - low) * (torch.tanh(spread + shift) + 1)
        shape = (len(features), self.chunk, self.action_dim)
        return mean.reshape(shape), log_std.reshape(shape)

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act, without gradients; see :meth:`Policy.sample`."""
        mean, log_std = self._distribution(self.encode(observations))
        inner = mean if noise is None else torch.addcmul(mean, log_std.exp(), noise[ACTIONS])
        actions = self.centre + self.radius * torch.tanh(inner)
        actions = actions.clamp(self.action_low, self.action_high)  # rounding may leave it
        return ActionSample(
            actions=actions,
            log_probs=self._log_probs(actions, mean, log_std),
            forward_inputs={RAW_ACTIONS: actions},
        )

    def forward(
        self,
        given: Any,
        noise: Tensor | None = None,
        *,
        imitate: bool = False,
        mode: bool = False,
    ) -> Any:
        """Stored actions of a batch; with noise [N, C, A], new ones that gradients flow through.

        Without noise ``given`` is a batch; else observations, each [N, ...], for which actions [N,
        C, A] and their log-probs [N], summed over the chunk, are returned.
        """
        if noise is None:
            return super().forward(given, imitate=imitate, mode=mode)
        return self.act(given, noise)

    def act(self, given: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, C, A] that gradients flow through, and log-probs [N]; see forward."""
        mean, log_std = self._distribution(self.encode(given))
        inner = torch.addcmul(mean, log_std.exp(), noise)
        log_probs = gaussian_log_prob(deviation=noise, log_std=log_std) - squash_correction(inner)
        log_probs = of_own_dimensions(log_probs, given)
        return self.centre + self.radius * torch.tanh(inner), log_probs.flatten(1).sum(dim=1)

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions; see the base class.

        The entropy has no closed form: that of one sample, −log p, is returned, which tells it but
        has no gradient that raises it.
        """
        features = self.encode(forward_inputs)
        mean, log_std = self._distribution(features)
        log_probs = self._log_probs(forward_inputs[RAW_ACTIONS], mean, log_std)
        return ActionEvaluation(
            log_probs=log_probs,
            values=self._values(self.critic_features(forward_inputs, features)),
            entropy=-log_probs,
        )

    def _log_probs(self, actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """[B, C, A] of actions in the box; within 1e-6 of a bound, those at that distance."""
        scaled = ((actions - self.centre) / self.radius).clamp(-_NEAR_BOUND, _NEAR_BOUND)
        inner = torch.atanh(scaled)
        deviation = (inner - mean) * (-log_std).exp()
        return gaussian_log_prob(deviation=deviation, log_std=log_std) - squash_correction(inner)


def register_box(module: nn.Module, config: SquashedConfig, env_spec: EnvSpec) -> None:
    """Give a module the middle and half the width of the action box [A]: ``centre``, ``radius``."""
    low, high = (
        torch.as_tensor(bound, dtype=torch.float32).expand(env_spec.action_dim)
        for bound in (env_spec.action_low, env_spec.action_high)
    )
    radius = (high - low) / 2
    if not bool(radius.isfinite().all()):
        number = int((~radius.isfinite()).int().argmax())
        raise ConfigError(
            f"model.type: {config.type} squashes actions into their box, but dimension {number} of "
            f"the environment's actions goes from {low[number]:g} to {high[number]:g}; use mlp, or "
            "bound the actions of the environment"
        )
    if not bool((radius > 0).all()):
        number = int(radius.argmin())
        raise ConfigError(
            f"model.type: {config.type} squashes actions into their box, in which dimension "
            f"{number} of the environment's actions can only be {low[number]:g}; use mlp, or leave "
            "it out with gymnasium.wrappers.TransformAction"
        )
    module.register_buffer("centre", low + radius, persistent=False)
    module.register_buffer("radius", radius, persistent=False)


def squash_correction(inner: Tensor) -> Tensor:
    """log(1 − tanh² u), elementwise: 2 (log 2 − u − softplus(−2u)), which never is log 0."""
    return 2.0 * (_LOG_TWO - inner - functional.softplus(-2.0 * inner))


class QFunctions(nn.Module):
    """H value functions of a state and an action chunk, evaluated together."""

    centre: Tensor
    radius: Tensor

    def __init__(self, config: SquashedMLPConfig, env_spec: EnvSpec, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        state_dim = states_dim(env_spec, needed_by=config.type)
        register_box(self, config, env_spec)
        self.normalizer = normalizer_of(config, env_spec)
        self._tasks = told_tasks(env_spec)
        inputs = state_dim + self._tasks + config.num_action_chunks * env_spec.action_dim
        self._add_functions(config, inputs, generator)

    def _add_functions(
        self, config: SquashedConfig, inputs: int, generator: torch.Generator
    ) -> None:
        """Make H perceptrons on features and actions of this width together."""
        self._activation = ACTIVATIONS[config.activation]
        widths = [inputs, *config.q_hidden_sizes, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for rows, columns in itertools.pairwise(widths):
            # As torch initialises linear layers: U(−1/√n, 1/√n) for n inputs.
            bound = 1.0 / math.sqrt(rows)
            for parameters, shape in ((self.weights, (rows, columns)), (self.biases, (1, columns))):
                drawn = torch.rand((config.q_functions, *shape), generator=generator)
                parameters.append(nn.Parameter((2.0 * drawn - 1.0) * bound))

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[N, D] features of observations, each [N, ...]."""
        states = observations["states"]
        if self.normalizer is not None:
            states = self.normalizer(states, observations.get(TASK_IDS))
        return with_task(states, observations, self._tasks)

    def forward(self, observations: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """[H, N] values of observations, each [N, ...], and actions [N, C, A]."""
        scaled = of_own_dimensions((actions - self.centre) / self.radius, observations)
        features = torch.cat([self.encode(observations), scaled.flatten(1)], dim=1)
        layers = len(self.weights)
        outputs = features.expand(len(self.weights[0]), *features.shape)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            outputs = torch.baddbmm(bias, outputs, weight)
            if number < layers - 1:
                outputs = self._activation(outputs)
        return owned(outputs.squeeze(-1))

    def update_normalizer(self, observations: Mapping[str, Tensor]) -> None:
        """Take states [N, D] into the running statistics."""
        if self.normalizer is not None:
            self.normalizer.update(observations["states"], observations.get(TASK_IDS))


class Temperature(nn.Module):
    """α = exp(log α), the price of a nat of entropy in units of reward."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([math.log(initial)]))  # ranks divide no scalar

    def forward(self) -> Tensor:
        """α, a scalar."""
        return owned(self.log_alpha.exp().squeeze(0))
