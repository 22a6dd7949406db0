"""Soft actor-critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications").

A row is a transition of one action chunk of C primitive actions: what was seen, what was done,
Σ γ^k r_k over the chunk, and what was seen then. A time limit is no end: only a termination stops
the bootstrap, and a transition at the limit leads to the last observation of its own episode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import SoftActorCriticConfig
from rlinf.algorithms.credit import idle_rows
from rlinf.algorithms.protocol import Algorithm, Loss, Modules, Share
from rlinf.algorithms.samples import mean
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import ACTION_MASK
from rlinf.models.policy import RAW_ACTIONS

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.config import ModelConfig

NEXT = "next."
"""Prefix in ``Batch.inputs`` of the observations that followed."""
NOISE, NEXT_NOISE, DISCOUNTS = "noise", "next_noise", "discounts"


Counted = Literal["min", "mean"]


def counted_value(values: Tensor, of: Counted = "min") -> Tensor:
    """[N] of the values [H, N] of Q functions, the smallest or the mean."""
    return values.amin(dim=0) if of == "min" else values.mean(dim=0)


def soft_targets(
    *,
    rewards: Tensor,
    discounts: Tensor,
    next_values: Tensor,
    next_log_probs: Tensor,
    alpha: Tensor | float,
    counted: Counted = "min",
) -> Tensor:
    """y = r + d (min_j Q̄_j(s', a') − α log π(a'|s')) [N] (eq. 3, 5).

    Discounts [N] are γ^C, 0 where the episode terminated; ``next_values`` [H, N] are of the target
    Q functions; min or mean.
    """
    return rewards + discounts * (counted_value(next_values, counted) - alpha * next_log_probs)


def critic_terms(*, values: Tensor, targets: Tensor) -> Tensor:
    """[N] squared errors of Q functions [H, N] against targets [N], their mean over H."""
    return (values - targets).square().mean(dim=0)


def policy_terms(
    *, values: Tensor, log_probs: Tensor, alpha: Tensor, counted: Counted = "min"
) -> Tensor:
    """[N] α log π(a|s) − min_j Q_j(s, a) (eq. 7), of values [H, N]; min or mean."""
    return alpha * log_probs - counted_value(values, counted)


def temperature_terms(
    *, alpha: Tensor, log_probs: Tensor, target_entropy: float | Tensor
) -> Tensor:
    """[N] −α (log π(a|s) + H̄) (eq. 18); of ``alpha`` alone there is a gradient. H̄, in nats, is one
    number or [N]."""
    return -alpha * (log_probs + target_entropy)


def chunk_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Σ_k γ^k r_k over the last dimension of [..., C]."""
    powers = rewards.new_tensor([gamma**k for k in range(rewards.shape[-1])])
    return (rewards * powers).sum(dim=-1)


def polyak_update(targets: nn.Module, sources: nn.Module, tau: float) -> None:
    """Target parameters ← (1 − τ) target + τ source; buffers are copied."""
    for target, source in zip(targets.parameters(), sources.parameters(), strict=True):
        target.data.lerp_(source.data, tau)
    for kept, present in zip(targets.buffers(), sources.buffers(), strict=True):
        kept.copy_(present)


class SAC(Algorithm):
    """Critic, policy and temperature, each with a loss and an optimizer step of its own."""

    def __init__(self, config: SoftActorCriticConfig, *, group_size: int = 1) -> None:
        del group_size  # environments are not compared with each other
        self.config = config

    def modules(self, model: ModelConfig, env_spec: EnvSpec, *, seed: int) -> dict[str, nn.Module]:
        """What is trained, and the targets, with fresh weights."""
        from rlinf.models.soft_actor_critic import Temperature

        return {
            **super().modules(model, env_spec, seed=seed),
            "critic": model.build_q_functions(env_spec, seed=seed + 1),
            "target_critic": model.build_q_functions(env_spec, seed=seed + 1),
            "temperature": Temperature(self.config.initial_temperature),
        }

    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """A rollout as transitions for a replay, in the order of time and then of environments.

        Left out are rows that a fault spoilt, and those of environments that had ended and rested.

        Returns:
            Rows whose ``inputs`` are the observations, the raw actions [N, C, A], ``discounts`` [N]
            and, under ``next.`` and their names, the observations that followed.
        """
        if isinstance(rollout, Batch):
            return rollout, {}
        gamma, rewards = self.config.gamma, rollout.rewards
        kept = (rollout.valid & ~idle_rows(rollout)).flatten()
        bootstraps = ~rollout.terminations.any(dim=-1)
        discounts = gamma**rollout.chunk * bootstraps.to(rewards.dtype)
        following = {NEXT + name: column for name, column in rollout.next_observations.items()}
        inputs = {**rollout.forward_inputs, **following, DISCOUNTS: discounts}
        batch = Batch(
            inputs={name: column.flatten(0, 1) for name, column in inputs.items()},
            mask=kept.unsqueeze(1).to(rewards.dtype),
            log_probs=rollout.log_probs.flatten(0, 1).flatten(1).sum(dim=1, keepdim=True),
            rewards=chunk_returns(rewards, gamma).flatten(),
            versions=rollout.versions.flatten().unsqueeze(1),
            groups=rollout.episode_ids.flatten(),
            truncated=rollout.truncations.any(dim=-1).flatten(),
            valid=rollout.valid.flatten(),
        ).select(kept)
        return batch, {"rollout/rewards": mean(rewards.sum(dim=-1).flatten()[kept])}

    def with_noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch with the noise [N, C, A] of the actions that its losses sample."""
        actions = batch.inputs[RAW_ACTIONS]
        noise = {
            name: actions.new_empty(actions.shape).normal_(generator=generator)
            for name in (NOISE, NEXT_NOISE)
        }
        return replace(batch, inputs={**batch.inputs, **noise})

    def normalizer(self, batch: Batch) -> float:
        """Rows of the global batch."""
        return float(len(batch))

    def losses(self) -> tuple[Loss, ...]:
        """Critic, policy, temperature, in this order."""
        losses = (
            Loss("critic", ("critic",), self._critic_loss),
            Loss("policy", ("policy",), self._policy_loss),
            Loss("temperature", ("temperature",), self._temperature_loss),
        )
        return losses if self.config.learn_temperature else losses[:2]

    def _critic_loss(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        with torch.no_grad():
            seen = _next_observations(batch)
            actions, log_probs = modules["policy"](seen, batch.inputs[NEXT_NOISE])
            targets = soft_targets(
                rewards=batch.rewards,
                discounts=batch.inputs[DISCOUNTS],
                next_values=modules["target_critic"](seen, actions),
                next_log_probs=log_probs,
                alpha=modules["temperature"]() if self.config.backup_entropy else 0.0,
                counted=self.config.agg_q,
            )
        values = modules["critic"](batch.inputs, batch.inputs[RAW_ACTIONS])
        loss = critic_terms(values=values, targets=targets).sum() / normalizer
        mean = values.detach().mean(dim=0).sum() / normalizer
        return loss, {"critic/values": mean, "critic/targets": targets.sum() / normalizer}

    def _policy_loss(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        actions, log_probs = modules["policy"](batch.inputs, batch.inputs[NOISE])
        values = modules["critic"](batch.inputs, actions)
        alpha = modules["temperature"]().detach()
        terms = policy_terms(
            values=values, log_probs=log_probs, alpha=alpha, counted=self.config.agg_q
        )
        loss = terms.sum() / normalizer
        return loss, {
            "actor/entropy": -log_probs.detach().sum() / normalizer,
            "actor/temperature": alpha * (len(batch) / normalizer),
        }

    def _temperature_loss(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        with torch.no_grad():
            _, log_probs = modules["policy"](batch.inputs, batch.inputs[NOISE])
        wanted: float | Tensor | None = self.config.target_entropy
        if wanted is None:
            actions = batch.inputs[RAW_ACTIONS]
            wanted = -float(actions[0].numel())
            if ACTION_MASK in batch.inputs:  # of each row's own dimensions
                wanted = -batch.inputs[ACTION_MASK].sum(dim=1).to(actions) * actions.shape[1]
        terms = temperature_terms(
            alpha=modules["temperature"](), log_probs=log_probs, target_entropy=wanted
        )
        return terms.sum() / normalizer, {}

    def after_update(self, modules: Modules) -> None:
        """The targets follow the Q functions."""
        polyak_update(modules["target_critic"], modules["critic"], self.config.tau)


def _next_observations(batch: Batch) -> dict[str, Tensor]:
    return {
        name.removeprefix(NEXT): column
        for name, column in batch.inputs.items()
        if name.startswith(NEXT)
    }
