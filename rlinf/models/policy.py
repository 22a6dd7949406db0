"""What every policy for actions offers to rollout and training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rlinf.checkpoint.weights import check_compatible
from rlinf.envs.results import ACTION_MASK
from rlinf.errors import CheckpointError, ConfigError

RAW_ACTIONS = "raw_actions"
"""Name in ``forward_inputs`` of the sampled actions before they were clipped to the box."""


@dataclass(frozen=True)
class ActionSample:
    """What a policy does in B environments.

    Args:
        actions: [B, C, A] float32, clipped to the box of the environment.
        log_probs: [B, C, A] float32, of the raw actions.
        forward_inputs: What :meth:`Policy.evaluate_actions` needs beside the observations, each
            [B, ...]: the raw actions.
    """

    actions: Tensor
    log_probs: Tensor
    forward_inputs: dict[str, Tensor]


@dataclass(frozen=True)
class ActionEvaluation:
    """Stored actions under the present weights.

    Args:
        log_probs: [B, C, A].
        values: [B, V].
        entropy: [B, C, A], of each action dimension, in nats.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor


def of_own_dimensions(per_dimension: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
    """Log-probs or entropies [B, C, A], 0 in the action dimensions that a row's environment lacks.

    Several simulators in one batch may take actions of different dimension: what a policy gives
    beyond an environment's own is never executed and counts for nothing.
    """
    mask = observations.get(ACTION_MASK)
    return per_dimension if mask is None else torch.where(mask.unsqueeze(1), per_dimension, 0.0)


class Policy(torch.nn.Module, ABC):
    """A distribution over action chunks, with a critic.

    A policy draws no random numbers: noise is an argument, so that a rollout does not depend on
    how the environments are split over workers.
    """

    chunk: int
    """C, primitive actions per chunk."""
    action_dim: int
    """A."""
    value_dim: int
    """V: 1, C, or 0 without a critic."""
    values_in_parts: ClassVar[bool] = False
    """Whether the values of few rows take as long, for each row, as those of many: then they are
    computed while the environments are at work on other devices, otherwise at once at the end."""

    @abstractmethod
    def sample(self, observations: Mapping[str, Tensor], noise: Tensor | None) -> ActionSample:
        """Act on observations, each [B, ...], without gradients.

        The noise is [B, C, A] standard normal; None takes the mode of the distribution.
        """

    @abstractmethod
    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions, with gradients.

        The inputs are the observations and what :meth:`sample` returned as such, each [B, ...].
        """

    def forward(self, batch: Any) -> ActionEvaluation:
        """Actions of a :class:`~rlinf.algorithms.batch.Batch` under the present weights."""
        found, inputs = self.evaluate_actions(batch.inputs), batch.inputs
        if ACTION_MASK not in inputs:
            return found
        return replace(
            found,
            log_probs=of_own_dimensions(found.log_probs, inputs),
            entropy=of_own_dimensions(found.entropy, inputs),
        )

    @abstractmethod
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""

    @abstractmethod
    def value_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that only the values depend on; they may have their own learning rate."""

    def adapted_layers(self) -> Iterator[str]:
        """Names of the linear layers that adapters wrap: all but those of the values, which begin
        afresh and are trained whole."""
        of_values = {id(parameter) for parameter in self.value_parameters()}
        for name, part in self.named_modules():
            if isinstance(part, torch.nn.Linear) and id(part.weight) not in of_values:
                yield name

    @abstractmethod
    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Take observations [N, ...] into the running observation statistics.

        Called after an update and before the weights are synchronised, so that rollout and training
        use equal statistics.
        """


def load_initial_weights(policy: Policy, path: Path) -> None:
    """Let a policy begin with the weights of a file.

    The critic begins afresh where the file holds none, as that of a policy which has imitated.
    ConfigError, and nothing changed, where it holds other tensors than the policy has.
    """
    try:
        found = safetensors.torch.load_file(path.expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} holds no weights: {error}", key="model.path") from error
    own = policy.state_dict()
    of_values = {id(parameter) for parameter in policy.value_parameters()}
    critic = {name for name, each in policy.named_parameters() if id(each) in of_values}
    if not critic & found.keys():
        own = {name: tensor for name, tensor in own.items() if name not in critic}
    try:
        check_compatible(own, found, source=str(path))
    except CheckpointError as error:
        raise ConfigError(str(error), key="model.path") from error
    policy.load_state_dict(found, strict=False)


class ObservationNormalizer(torch.nn.Module):
    """Running mean and variance of observations, applied as (x − mean) / std, clipped to ±clip.

    The statistics are combined by the parallel algorithm of Chan, Golub and LeVeque (1979) in
    float64. ``mean`` and ``scale`` are what the forward pass uses; all buffers are persistent and
    therefore travel with the weights.

    Args:
        dim: D.
        clip: Bound of the result.
        epsilon: Added to the variance.
        task_sections: Of several simulators, whose states have nothing to do with each other: which
            of them each task is of. Each has statistics of its own, [sections, D], in which its
            padding is 0 and remains 0; empty for one.
    """

    mean: Tensor
    scale: Tensor
    running_mean: Tensor
    running_variance: Tensor
    count: Tensor
    section_of_task: Tensor

    def __init__(
        self,
        dim: int,
        *,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        task_sections: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        each = (max(task_sections) + 1,) if task_sections else ()
        self.register_buffer("mean", torch.zeros(*each, dim))
        self.register_buffer("scale", torch.ones(*each, dim))
        self.register_buffer("running_mean", torch.zeros(*each, dim, dtype=torch.float64))
        self.register_buffer("running_variance", torch.ones(*each, dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(each, dtype=torch.float64))
        of_task = torch.tensor(task_sections, dtype=torch.int64)
        self.register_buffer("section_of_task", of_task, persistent=False)

    def _sections(self, task_ids: Tensor | None) -> Tensor | None:
        """[B] the simulator of each row; None where there is one."""
        if not len(self.section_of_task):
            return None
        if task_ids is None:
            raise ValueError("of several simulators, task_ids must say which one a row is of")
        return self.section_of_task[task_ids]

    def forward(self, observations: Tensor, task_ids: Tensor | None = None) -> Tensor:
        """[B, D] to [B, D]; with several simulators, the tasks [B] of the rows say of which."""
        mean, scale, section = self.mean, self.scale, self._sections(task_ids)
        if section is not None:
            mean, scale = mean[section], scale[section]
        return torch.sub(observations, mean).mul_(scale).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, observations: Tensor, task_ids: Tensor | None = None) -> None:
        """Take [N, D] observations, of the tasks [N], into the statistics."""
        section = self._sections(task_ids)
        if section is None:
            self._take(observations, ...)
            return
        for number in range(len(self.count)):
            self._take(observations[section == number], number)

    def _take(self, observations: Tensor, section: Any) -> None:
        if not len(observations):
            return
        batch = observations.to(torch.float64)
        variance, mean = torch.var_mean(batch, dim=0, correction=0)
        total = self.count[section] + len(batch)
        delta = mean - self.running_mean[section]
        weight = len(batch) / total
        self.running_variance[section].mul_(1 - weight).add_(
            variance * weight + delta.square() * (weight * (1 - weight))
        )
        self.running_mean[section].add_(delta * weight)
        self.count[section].copy_(total)
        self.mean[section].copy_(self.running_mean[section])
        self.scale[section].copy_((self.running_variance[section] + self.epsilon).rsqrt())
