"""Policies that denoise actions in K steps, some of them random: what their chains are worth.

Log-probs are those of πRL (https://arxiv.org/abs/2510.25889), with two differences to its code.
Which step is random is drawn for each row, not for a whole batch; and log-densities of several
steps are summed, as the probability of a chain is a product, where the code takes their mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.policy import ActionEvaluation, ActionSample, NoiseSpec
from rlinf.models.vla.chunk_policy import ChunkPolicy
from rlinf.models.vla.flow_matching import Spread, spread_of, standard_log_prob


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
    def _predicted(self, *given: Any) -> Any:
        """What the network says, after what was read, of x [B, H, A'] at a step, which is that of
        all rows or of each, [B]."""

    @abstractmethod
    def _random_step(self, said: Any, x: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, H, A'] and deviation of the random step from x, float32. The deviation is that
        of each element, of a row as [B, 1, 1], or of all as [1, 1, 1]."""

    @abstractmethod
    def _plain_step(self, said: Any, x: Tensor, step: int) -> Tensor:
        """Where the deterministic step from x goes, [B, H, A'] float32."""

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

    @property
    def evaluation_noise(self) -> Mapping[str, NoiseSpec]:
        """Where denoising starts; its steps are deterministic, as in the published evaluations."""
        return {"start": self.noise["start"]}

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Denoise actions; without noise by deterministic steps from 0, the mode of the start."""
        read, steps = self._read(observations), self._config.denoising_steps
        x = self._blank(observations) if noise is None else noise["start"]
        which, chain, moves, before, after = self._drawn_step(noise), [x], [], x, x
        normals = noise["steps"].unbind(1) if noise is not None and "steps" in noise else ()
        for step in range(steps):
            said = self._predicted(*read, x, step)
            if not normals:
                x = self._plain_step(said, x, step)
            elif which is None:
                mean, std = self._random_step(said, x, step)
                x = torch.addcmul(mean, std, normals[step])
                moves.append((mean, std))
            else:
                mean, std = self._random_step(said, x, step)
                chosen = (which == step).reshape(-1, 1, 1)
                before = torch.where(chosen, x, before)
                plain = self._plain_step(said, x, step)
                x = torch.where(chosen, torch.addcmul(mean, std, normals[0]), plain)
                after = torch.where(chosen, x, after)
                last = moves.pop() if moves else (mean, std)
                moves.append(
                    (torch.where(chosen, mean, last[0]), torch.where(chosen, std, last[1]))
                )
            chain.append(x)
        passed = torch.stack(chain if which is None else [before, after], dim=1)
        kept = {} if which is None else {"step_index": which, "denoised": x}
        return ActionSample(
            actions=self._to_env(x, observations),
            log_probs=self._of_env(self._judged(passed, moves)[0]),
            forward_inputs={"chain": passed, **kept},
            values=self._values(*read) if noise is not None and self.value_dim else None,
        )

    def _move(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the random step; see :meth:`_predicted`."""
        return self._random_step(self._predicted(*given), *given[-2:])

    def _judged(
        self, chain: Tensor, moves: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Spread | None]:
        """Log-probs [B, H, A'] of n random steps along a chain [B, n + 1, H, A'], each with its
        mean and deviation, and of where it starts, if all steps are random; and their spread."""
        if not moves:
            return torch.zeros_like(chain[:, 0]), None
        means, stds = zip(*moves, strict=True)
        spread = self._spread or spread_of(torch.stack(stds, dim=1))
        found = spread.log_prob(chain[:, 1:], torch.stack(means, dim=1)).sum(dim=1)
        if self._config.all_random:
            found = found + standard_log_prob(chain[:, 0])
        return found, spread

    @property
    def _spread(self) -> Spread | None:
        """Of all steps, each [1, K, 1, 1], where all are random and states change nothing in it."""
        return None

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
        chain = forward_inputs["chain"]
        if chain.is_inference() and not torch.is_inference_mode_enabled():
            chain = chain.clone()  # what was sampled so takes no part in gradients
        which = forward_inputs.get("step_index")
        steps = range(self._config.denoising_steps) if which is None else (which,)
        # The last of the chain is where it ends.
        moves = [self._move(*read, *at) for at in zip(chain.unbind(1), steps, strict=False)]
        log_probs, spread = self._judged(chain, moves)
        assert spread is not None
        values = self._values(*read)
        entropy = self._of_env(spread.entropy().sum(dim=1).expand_as(log_probs))
        return ActionEvaluation(self._of_env(log_probs), values, entropy)

    @torch.inference_mode()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""
        return self._values(*self._read(observations))
