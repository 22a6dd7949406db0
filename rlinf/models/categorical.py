"""Categorical distribution over discrete actions, and the policy of perceptrons on states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.actor_critic import ActorCriticPolicy, ReadsStates
from rlinf.models.config import TrunkPolicyConfig
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, ActionEvaluation, ActionSample, NoiseSpec

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


IMPOSSIBLE = -1e9
"""Logit of what cannot be chosen: its probability is 0, and finite times 0 is 0."""


class CategoricalPolicy(ActorCriticPolicy):
    """Base of the categorical policies, which choose for each of A actions one of its n in each
    step of a chunk: a subclass says how observations become features. All choices of a chunk are
    independent."""

    _last: Tensor
    _legal: Tensor

    def __init__(
        self,
        config: TrunkPolicyConfig,
        env_spec: EnvSpec,
        *,
        feature_dim: int,
        value_dim: int,
        generator: torch.Generator,
        critic_dim: int | None = None,
    ) -> None:
        choices = env_spec.choices
        if choices is None:
            raise ConfigError(
                f"model.type: {config.type} gives discrete actions, the environment takes "
                f"{env_spec.action_kind} ones; nearest: mlp, or cnn for pictures"
            )
        super().__init__(
            config,
            env_spec,
            outputs=config.num_action_chunks * sum(choices),
            feature_dim=feature_dim,
            value_dim=value_dim,
            generator=generator,
            critic_dim=critic_dim,
        )
        self.choices = choices
        """[A] n of each action."""
        numbers = torch.tensor(choices)
        legal = torch.arange(max(choices)) < numbers[:, None]
        self.register_buffer("_last", numbers[:, None] - 1, persistent=False)
        self.register_buffer("_legal", legal, persistent=False)
        self._even = bool(legal.all())

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """A uniform number for each choice."""
        return {ACTIONS: NoiseSpec((self.chunk, self.action_dim), "uniform")}

    def _log_softmax(self, features: Tensor) -> Tensor:
        """[B, C, A, n] logarithms of the probabilities; those of an action with fewer choices than
        the most are followed by very small ones."""
        logits: Tensor = self.actor(features).view(-1, self.chunk, sum(self.choices))
        if self._even:
            return logits.view(*logits.shape[:-1], *self._legal.shape).log_softmax(dim=-1)
        padded = logits.new_full((*logits.shape[:-1], *self._legal.shape), IMPOSSIBLE)
        padded[..., self._legal] = logits
        return padded.log_softmax(dim=-1)

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act by the inverse of the distribution function; see :meth:`Policy.sample`."""
        all_log_probs = self._log_softmax(self.encode(observations))
        if noise is None:
            chosen = all_log_probs.argmax(dim=-1, keepdim=True)
        else:
            below = all_log_probs.exp().cumsum(dim=-1) <= noise[ACTIONS].unsqueeze(-1)
            # The sum may end below 1 by rounding.
            chosen = below.sum(dim=-1, keepdim=True).minimum(self._last)
        actions = chosen.squeeze(-1).float()
        return ActionSample(
            actions=actions,
            log_probs=all_log_probs.gather(-1, chosen).squeeze(-1),
            forward_inputs={RAW_ACTIONS: actions},
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions; see the base class."""
        features = self.encode(forward_inputs)
        all_log_probs = self._log_softmax(features)
        chosen = forward_inputs[RAW_ACTIONS].long().unsqueeze(-1)
        return ActionEvaluation(
            log_probs=all_log_probs.gather(-1, chosen).squeeze(-1),
            values=self._values(self.critic_features(forward_inputs, features)),
            entropy=-(all_log_probs.exp() * all_log_probs).sum(dim=-1),
        )


class CategoricalMLPPolicy(ReadsStates, CategoricalPolicy):
    """Discrete actions."""
