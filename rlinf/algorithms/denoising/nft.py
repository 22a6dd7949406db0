"""Negative-aware fine-tuning of policies that denoise their actions (Zheng et al. 2025,
"DiffusionNFT", https://arxiv.org/abs/2509.16117).

What was done is noised, as for imitation. The policy that acted, v_old, and the one in training, v,
give two velocities, v± = v_old ± β (v − v_old), of which one is to predict a good action and the
other a bad one. Nothing else is needed of how the action was sampled, least of all its probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.denoising.config import NFTConfig
from rlinf.algorithms.grpo import GroupCredit
from rlinf.algorithms.losses import aggregate, aggregation_normalizer
from rlinf.algorithms.protocol import Algorithm, Modules, Share
from rlinf.algorithms.samples import (
    Credit,
    advantages_of,
    chunk_step_metrics,
    mean,
    row_weights,
    rows_of,
)
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import ACTION_MASK
from rlinf.models.denoising import POINT, POINT_TIME

Weighting = Literal["constant", "adaptive", "sigma"]

WANTED, SCALE, STD, OLD = "point_wanted", "point_scale", "point_std", "point_old"
_LEAST_ERROR, _LEAST_VARIANCE = 1e-5, 1e-4


def candidates(*, velocity: Tensor, old: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """v_old + β (v − v_old) and v_old − β (v − v_old), of any shape (eq. 5 of the paper)."""
    change = beta * (velocity - old)
    return old + change, old - change


def energies(
    *,
    velocity: Tensor,
    wanted: Tensor,
    scale: Tensor,
    std: Tensor,
    weighting: Weighting,
    whole_chunk: bool = False,
    own: Tensor | None = None,
) -> Tensor:
    """Mean weighted squared error of what velocities predict, over the dimensions of an action.

    Args:
        velocity: [N, C, A].
        wanted: [N, C, A], which would predict the target.
        scale: [N], from a difference of velocities to one of predictions.
        std: [N] deviation of the denoising step.
        weighting: ``constant`` 1; ``adaptive`` one over the mean absolute error of the term, which
            carries no gradient (§3.3 of the paper); ``sigma`` 1 / (std² + 1e-4).
        whole_chunk: Over those of all actions of the chunk instead.
        own: [N, A] bool, the dimensions that an environment has; None: all.

    Returns:
        [N, C], or [N, 1].
    """
    error = scale.reshape(-1, 1, 1) * (velocity - wanted)

    def over(terms: Tensor) -> Tensor:
        found = _mean_of_own(terms, own, dim=(-1,))
        return found.mean(dim=1, keepdim=True) if whole_chunk else found

    energy = over(error.square())
    if weighting == "adaptive":
        return energy / over(error.detach().abs()).clamp(min=_LEAST_ERROR)
    if weighting == "sigma":
        return energy / (std.square() + _LEAST_VARIANCE).reshape(-1, 1)
    return energy


def _mean_of_own(terms: Tensor, own: Tensor | None, *, dim: tuple[int, ...]) -> Tensor:
    """Mean of [N, C, A] over dimensions up to the last, of ``own`` [N, A] alone; None: of all."""
    if own is None:
        return terms.mean(dim=dim)
    held = own.unsqueeze(1).to(terms).expand_as(terms)
    return (terms * held).sum(dim=dim) / held.sum(dim=dim).clamp(min=1)


def regression_terms(
    *, good: Tensor, towards: Tensor, away: Tensor, beta: float, factor: float
) -> Tensor:
    """(r e⁺ + (1 − r) e⁻) · factor / β elementwise (eq. 6 of the paper); r is ``good``."""
    return (good * towards + (1.0 - good) * away) * (factor / beta)


def preference_terms(*, good: Tensor, towards: Tensor, away: Tensor, dpo_beta: float) -> Tensor:
    """softplus(½ · dpo_beta · (2 r − 1) · (e⁺ − e⁻)) elementwise."""
    return functional.softplus(0.5 * dpo_beta * (2.0 * good - 1.0) * (towards - away))


def bounded_change(
    *, velocity: Tensor, old: Tensor, bound: float, whole_chunk: bool, own: Tensor | None = None
) -> Tensor:
    """[N, C, A] velocities that are no further from ``old`` than ``bound`` times its norm, over an
    action or the chunk; one that is cut carries no gradient. ``own`` [N, A] bool: norms are of the
    dimensions that an environment has; None: of all."""
    dims = (1, 2) if whole_chunk else (2,)
    change = velocity - old
    measured = (change, old) if own is None else (change * own.unsqueeze(1), old * own.unsqueeze(1))
    norms = [torch.linalg.vector_norm(each, dim=dims, keepdim=True) for each in measured]
    share = bound * norms[1].clamp(min=1e-8) / norms[0].clamp(min=1e-8)
    return old + torch.where(share < 1.0, (change * share).detach(), change)


def signals(advantages: Tensor, *, clip: float) -> Tensor:
    """r = (clip(A, ±c) + c) / 2c in [0, 1], elementwise (eq. 9 of the paper)."""
    return (advantages.clamp(-clip, clip) + clip) / (2.0 * clip)


class RawCredit(GroupCredit):
    """Each episode's own reward, cut to [0, 1]."""

    def _compare(self, scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        # Each counts by itself, as if it had been compared.
        return scores.clamp(0.0, 1.0), torch.full_like(groups, 2)


class NFT(Algorithm):
    """One regression or classification loss on velocities, weighted by how good an episode was."""

    reads_log_probs = False
    asked = (POINT, POINT_TIME, WANTED, SCALE, STD, OLD)

    def __init__(self, config: NFTConfig, *, group_size: int = 1) -> None:
        self.config = config
        credit: type[Credit] = GroupCredit if config.needs_groups else RawCredit
        self._credit = credit(config, group_size)
        shares = config.tau[:2] if isinstance(config.tau, tuple) else (config.tau,)
        self.averages = min(shares) < 1.0

    def share(self, step: int) -> float:
        """τ of the config."""
        return self.config.share(step)

    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """Rows whose ``advantages`` are r in [0, 1]; see :meth:`Algorithm.prepare`."""
        if isinstance(rollout, Batch):
            raise TypeError("nft learns from chunks of actions")
        config = self.config
        estimate = self._credit.of_chunk_steps(rollout)
        batch = rows_of(
            rollout,
            logprob_type=config.level,
            advantages=estimate.advantages,
            weights=row_weights(
                rollout, estimate.trained, by_length=config.weight_by_episode_length
            ),
        )
        metrics = chunk_step_metrics(rollout, batch) | estimate.metrics
        good = advantages_of(batch)
        if config.needs_groups:
            good = signals(good, clip=config.adv_clip_max)
        counted = good if batch.weights is None else good[batch.weights > 0]
        return replace(batch, advantages=good), metrics | {"rollout/good": mean(counted)}

    def ask(self, modules: Modules, batch: Batch) -> Sequence[Tensor]:
        """Points, and the velocity there of the weights that act."""
        policy: Any = modules["policy"]
        config = self.config
        resampled = config.xcur_source == "resample"
        points = policy.points(batch.inputs, target=config.target_space, resampled=resampled)
        inputs = {**batch.inputs, POINT: points.x, POINT_TIME: points.time}
        old = policy(replace(batch, inputs=inputs), velocity=True)
        return *(getattr(points, name) for name in ("x", "time", "wanted", "scale", "std")), old

    def normalizer(self, batch: Batch) -> float:
        """Terms to train on, by weight; 1 if there are none."""
        mask = batch.mask.double()
        count = aggregation_normalizer(mode="token-mean", mask=mask, weights=batch.weights)
        return count.item() or 1.0

    def _of_policy(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        return self.velocity_loss(
            modules["policy"](batch, velocity=True), batch, normalizer=normalizer
        )

    def velocity_loss(self, velocity: Tensor, batch: Batch, *, normalizer: float) -> Share:
        """Share of a micro batch, with what :meth:`ask` found out, in the loss of velocities
        [n, C, A] at its points."""
        config, old, good = self.config, batch.inputs[OLD], advantages_of(batch)
        own = batch.inputs.get(ACTION_MASK)

        def errors(at: Tensor) -> tuple[Tensor, Tensor]:
            both = candidates(velocity=at, old=old, beta=config.beta)
            towards, away = (self._energies(each, batch) for each in both)
            return towards * config.weight_scale[0], away * config.weight_scale[1]

        def regression(at: Tensor) -> Tensor:
            towards, away = errors(at)
            factor = config.adv_clip_max
            return regression_terms(
                good=good, towards=towards, away=away, beta=config.beta, factor=factor
            )

        towards, away = errors(velocity)
        numbers = {"energy_towards": towards, "energy_away": away}
        if config.loss_form == "dpo":
            terms = preference_terms(
                good=good, towards=towards, away=away, dpo_beta=config.dpo_beta
            )
        else:
            terms = regression(velocity)
        if config.max_drift is not None:
            whole = config.level == "chunk_level"
            near = bounded_change(
                velocity=velocity, old=old, bound=config.max_drift, whole_chunk=whole, own=own
            )
            bounded = regression(near)
            numbers["drift_clip_fraction"] = (terms < bounded).to(terms)
            terms = torch.maximum(terms, bounded)
        moved = (velocity.detach() - old).square()
        drift = _mean_of_own(moved, own, dim=(1, 2)).sqrt()
        numbers["drift"] = drift.unsqueeze(1).expand_as(terms)

        def share(of_terms: Tensor) -> Tensor:
            return aggregate(
                loss=of_terms,
                mode="token-mean",
                normalizer=normalizer,
                mask=batch.mask,
                weights=batch.weights,
            )

        loss = share(terms)
        return loss, {f"actor/{name}": share(each.detach()) for name, each in numbers.items()}

    def _energies(self, velocity: Tensor, batch: Batch) -> Tensor:
        """[n, K] of each term."""
        inputs, mode = batch.inputs, self.config.weight_mode

        def by(weighting: Weighting) -> Tensor:
            return energies(
                velocity=velocity,
                wanted=inputs[WANTED],
                scale=inputs[SCALE],
                std=inputs[STD],
                weighting=weighting,
                whole_chunk=self.config.level == "chunk_level",
                own=inputs.get(ACTION_MASK),
            )

        if mode != "auto":
            return by(mode)
        return torch.where(inputs[STD].unsqueeze(1) > 0, by("sigma"), by("adaptive"))

    def state_dict(self) -> dict[str, Any]:
        """Episodes that the last rollout left unfinished."""
        return self._credit.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._credit.load_state_dict(state)
