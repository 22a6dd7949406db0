"""Policies that denoise actions in K steps, some of them random: what their chains are worth.

Log-probs are those of πRL (https://arxiv.org/abs/2510.25889), with two differences to its code.
Which step is random is drawn for each row, not for a whole batch; and log-densities of several
steps are summed, as the probability of a chain is a product, where the code takes their mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.policy import ActionEvaluation, ActionSample, NoiseSpec
from rlinf.models.vla.chunk_policy import ChunkPolicy
from rlinf.models.vla.flow_matching import entropy_of, transition_log_prob


class DenoisingPolicy(ChunkPolicy):
    """Reads observations once, and denoises a chunk of actions from that.

    A subclass says what it reads, how a step goes, and which ones may be random. Its section has
    ``denoising_steps``, ``method`` and ``all_random``.
    """

    without_random_steps: ClassVar[tuple[str, str]] = ("the ODE", "flow_sde")
    """The method that has none in words, and the nearest that has."""

    @abstractmethod
    def _read(self, observations: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What all steps of a chain are given, with gradients."""

    @abstractmethod
    def _step(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """After what was read, x [B, H, A'] and its time [B]: mean and deviation of the random step
        from x, and the mean of the deterministic one, [B, H, A'] float32."""

    @abstractmethod
    def _time(self, step: int | Tensor, like: Tensor) -> Tensor:
        """[B] times of denoising steps [B], or of one for all rows."""

    @abstractmethod
    def _values(self, *read: Any) -> Tensor:
        """[B, V] of what was read."""

    @property
    @abstractmethod
    def _choices(self) -> int:
        """How many of the first steps may be the random one; 0: none is random."""

    def _blank(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, H, A'] zeros."""
        first, size = next(iter(observations.values())), self.network.size
        return torch.zeros(len(first), size.horizon, size.action_dim, device=first.device)

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """Where denoising starts, the noise of its random steps, and which step that is."""
        chain = (self.horizon, self.network.size.action_dim)
        found = {"start": NoiseSpec(chain)}
        if not self._choices:
            return found
        if self._config.all_random:
            return found | {"steps": NoiseSpec((self._config.denoising_steps, *chain))}
        return found | {"steps": NoiseSpec((1, *chain)), "step_index": NoiseSpec((), "uniform")}

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Denoise actions; without noise by deterministic steps from 0, the mode of the start."""
        read, blank, config = self._read(observations), self._blank(observations), self._config
        x = blank if noise is None else noise["start"]
        which = self._drawn_step(noise)
        chain, log_probs = [x], torch.zeros_like(x)
        if noise is not None and self._choices and config.all_random:
            log_probs = transition_log_prob(x, blank, torch.ones_like(x))
        before, after = x, x
        for step in range(config.denoising_steps):
            mean, std, plain = self._step(*read, x, self._time(step, x))
            if noise is None or not self._choices:
                x = plain
            elif which is None:
                x = mean + std * noise["steps"][:, step]
                log_probs = log_probs + transition_log_prob(x, mean, std)
            else:
                chosen = (which == step).reshape(-1, 1, 1)
                moved = mean + std * noise["steps"][:, 0]
                before = torch.where(chosen, x, before)
                log_probs = torch.where(chosen, transition_log_prob(moved, mean, std), log_probs)
                x = torch.where(chosen, moved, plain)
                after = torch.where(chosen, x, after)
            chain.append(x)
        kept = {"chain": torch.stack(chain, dim=1)}
        if which is not None:
            pair = torch.stack([before, after], dim=1)
            kept = {"chain": pair, "step_index": which, "denoised": x}
        return ActionSample(
            actions=self._to_env(x, observations),
            log_probs=self._of_env(log_probs),
            forward_inputs=kept,
            values=self._values(*read) if noise is not None and self.value_dim else None,
        )

    def _drawn_step(self, noise: Mapping[str, Tensor] | None) -> Tensor | None:
        """[B] int64, the random step of each row; None where all are, or none is."""
        if noise is None or "step_index" not in noise:
            return None
        return (noise["step_index"] * self._choices).long().clamp(max=self._choices - 1)

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs of the random steps of stored chains, reading the observations once."""
        if not self._choices:
            name, nearest = self.without_random_steps
            raise ConfigError(
                f"{name} has no random step whose log-prob could be trained; nearest: {nearest}",
                key="model.method",
            )
        read = self._read(forward_inputs)
        chain = forward_inputs["chain"].clone()  # it may have been sampled in inference mode
        which = forward_inputs.get("step_index")
        if which is not None:
            steps = [(self._time(which, chain), chain[:, 0], chain[:, 1])]
            log_probs = torch.zeros_like(chain[:, 0])
        else:
            steps = [
                (self._time(k, chain), chain[:, k], chain[:, k + 1])
                for k in range(self._config.denoising_steps)
            ]
            first = chain[:, 0]
            log_probs = transition_log_prob(first, torch.zeros_like(first), torch.ones_like(first))
        entropy = torch.zeros_like(log_probs)
        for time, before, after in steps:
            mean, std, _ = self._step(*read, before, time)
            log_probs = log_probs + transition_log_prob(after, mean, std)
            entropy = entropy + entropy_of(std)
        values = self._values(*read)
        return ActionEvaluation(self._of_env(log_probs), values, self._of_env(entropy))

    @torch.inference_mode()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""
        return self._values(*self._read(observations))
