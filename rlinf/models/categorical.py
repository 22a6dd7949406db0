"""Categorical distribution over discrete actions: separate actor and critic trunks, on states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.actor_critic import ReadsStates, states_dim, told_tasks
from rlinf.models.config import CategoricalMLPConfig
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, ActionEvaluation, ActionSample, NoiseSpec

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class CategoricalMLPPolicy(ReadsStates):
    """Chooses one of n actions in each step of a chunk; the choices of a chunk are independent."""

    def __init__(
        self,
        config: CategoricalMLPConfig,
        env_spec: EnvSpec,
        *,
        value_dim: int = 1,
        seed: int = 0,
    ) -> None:
        choices = env_spec.num_actions
        if choices is None:
            raise ConfigError(
                f"model.type: {config.type} gives discrete actions, the environment takes "
                f"{env_spec.action_kind} ones; nearest: mlp"
            )
        super().__init__(
            config,
            env_spec,
            outputs=config.num_action_chunks * choices,
            feature_dim=states_dim(env_spec, needed_by=config.type) + told_tasks(env_spec),
            value_dim=value_dim,
            generator=torch.Generator().manual_seed(seed),
        )
        self.choices = choices
        """n."""
        self._read_states(config, env_spec)

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """A uniform number for each choice."""
        return {ACTIONS: NoiseSpec((self.chunk, self.action_dim), "uniform")}

    def _log_softmax(self, features: Tensor) -> Tensor:
        """[B, C, n] logarithms of the probabilities."""
        logits: Tensor = self.actor(features).view(-1, self.chunk, self.choices)
        return logits.log_softmax(dim=-1)

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act by the inverse of the distribution function; see :meth:`Policy.sample`."""
        all_log_probs = self._log_softmax(self.encode(observations))
        if noise is None:
            chosen = all_log_probs.argmax(dim=-1, keepdim=True)
        else:
            below = all_log_probs.exp().cumsum(dim=-1) <= noise[ACTIONS]
            # The sum may end below 1 by rounding.
            chosen = below.sum(dim=-1, keepdim=True).clamp(max=self.choices - 1)
        actions = chosen.float()
        return ActionSample(
            actions=actions,
            log_probs=all_log_probs.gather(-1, chosen),
            forward_inputs={RAW_ACTIONS: actions},
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions; see the base class."""
        features = self.encode(forward_inputs)
        all_log_probs = self._log_softmax(features)
        chosen = forward_inputs[RAW_ACTIONS].long()
        return ActionEvaluation(
            log_probs=all_log_probs.gather(-1, chosen),
            values=self._values(self.critic_features(forward_inputs, features)),
            entropy=-(all_log_probs.exp() * all_log_probs).sum(dim=-1, keepdim=True),
        )
