"""What every policy for actions offers to rollout and training."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rlinf.checkpoint.weights import check_compatible
from rlinf.envs.results import ACTION_MASK
from rlinf.errors import CheckpointError, ConfigError

BASE = "base"
"""Name of :attr:`Policy.base` in what is written."""
RAW_ACTIONS = "raw_actions"
"""Name in ``forward_inputs`` of the sampled actions before they were clipped to the box."""
RECORDED = "recorded"
"""Name of [N, C] bool, which of the actions to be imitated were recorded; the others fill a chunk
beyond the end of its episode."""

ACTIONS = "actions"
"""Name of the noise of a policy whose actions need one normal number for each dimension."""


@dataclass(frozen=True)
class NoiseSpec:
    """Random numbers that a policy needs for one row: standard normal, or uniform in [0, 1)."""

    shape: tuple[int, ...]
    kind: Literal["normal", "uniform"] = "normal"

    def draw(self, leading: Sequence[int], generator: torch.Generator) -> Tensor:
        """[*leading, *shape] float32, on the host: the same numbers whatever the device."""
        make = torch.randn if self.kind == "normal" else torch.rand
        return make((*leading, *self.shape), generator=generator)


def draw_noise(
    specs: Mapping[str, NoiseSpec], leading: Sequence[int], generator: torch.Generator
) -> dict[str, Tensor]:
    """By name [*leading, ...], in the order of the names."""
    return {name: spec.draw(leading, generator) for name, spec in specs.items()}


@dataclass(frozen=True)
class ActionSample:
    """What a policy does in B environments.

    Args:
        actions: [B, C, A] float32, clipped to the box of the environment.
        log_probs: [B, C, A] float32, of what was sampled for each action dimension: a raw action, a
            token, or the stochastic steps of a denoising chain, whose log-densities are summed.
        forward_inputs: What :meth:`Policy.evaluate_actions` needs beside the observations, each
            [B, ...]: raw actions, tokens, a denoising chain.
        values: [B, V] of the same forward pass; None: :meth:`Policy.value` has them.
    """

    actions: Tensor
    log_probs: Tensor
    forward_inputs: dict[str, Tensor]
    values: Tensor | None = None


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
    base: str | None = None
    """What the weights that training leaves as they are come from, as a hash of files: they are not
    sent and not saved, as everyone builds them from there. None: nothing is left out."""
    imitates: ClassVar[bool] = False
    """Whether the policy has a supervised loss of its own, :meth:`imitation_errors`."""

    explores: ClassVar[bool] = False
    """Whether the policy itself says what acting at random is, by :meth:`explore`; otherwise it is
    uniform in the box of actions."""

    def explore(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor]
    ) -> ActionSample:
        """As :meth:`sample`, but whatever was learnt; before a learner begins."""
        raise NotImplementedError(f"{type(self).__name__} has no random acting of its own")

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """What :meth:`sample` needs, by name."""
        return {ACTIONS: NoiseSpec((self.chunk, self.action_dim))}

    @abstractmethod
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act on observations, each [B, ...], without gradients.

        The noise is as :attr:`noise` says, each [B, ...]; None takes the mode of the distribution.
        """

    @abstractmethod
    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions, with gradients.

        The inputs are the observations and what :meth:`sample` returned as such, each [B, ...].
        """

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """What :meth:`imitation_errors` needs, by name."""
        return {}

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, C, A] errors of recorded actions by the supervised loss of the model, with gradients.

        The inputs are observations, ``raw_actions`` [N, C, A] in the units of the environment, the
        noise that it needs, and, where some actions only fill a chunk, ``recorded`` [N, C].
        """
        raise NotImplementedError(f"{type(self).__name__} has no supervised loss of its own")

    def repeated_layers(self) -> list[torch.nn.Module]:
        """The layers that ranks gather one after another where they divide the policy."""
        return repeated_layers(self)

    def forward(self, batch: Any, *, imitate: bool = False) -> Any:
        """Actions of a :class:`~rlinf.algorithms.batch.Batch` under the present weights, as an
        :class:`ActionEvaluation`; with ``imitate`` their :meth:`imitation_errors`."""
        if imitate:
            recorded = (batch.mask > 0).view(len(batch.mask), self.chunk, -1).any(dim=-1)
            return self.imitation_errors({**batch.inputs, RECORDED: recorded})
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

    def trained_beside_adapters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of a policy with a :attr:`base` that are trained whole where adapters are:
        what begins afresh, such as the values."""
        return self.value_parameters()

    @abstractmethod
    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Take observations [N, ...] into the running observation statistics.

        Called after an update and before the weights are synchronised, so that rollout and training
        use equal statistics.
        """


def travelling(policy: Policy) -> dict[str, Tensor]:
    """What is sent to those who act and written into checkpoints, by name: all parameters, or those
    that are trained where the others have a :attr:`~Policy.base`; and saved buffers."""
    named = dict(policy.named_parameters())
    buffers = {name: each for name, each in policy.state_dict().items() if name not in named}
    own = {n: p for n, p in named.items() if policy.base is None or p.requires_grad}
    return own | buffers


def load_travelling(
    policy: Policy, weights: Mapping[str, Tensor], *, base: str | None = None
) -> None:
    """Take what :func:`travelling` of an equal policy gave.

    Raises:
        CheckpointError: It is that of another one; nothing changed.
        ConfigError: It is only a part, of a policy with another ``base``, where one is given.
    """
    own = travelling(policy)
    check_compatible(own, weights)
    if any(name not in own for name, _ in policy.named_parameters()):
        check_base(policy, base, source="the checkpoint")
    policy.load_state_dict(weights, strict=False)


def repeated_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The longest list of modules in a module: its layers."""
    lists = [list(part) for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def checkpoint_layers(policy: Policy) -> None:
    """Let each repeated layer keep only its inputs for the backward pass, and compute the rest
    again there."""
    from torch.utils.checkpoint import checkpoint

    for layer in policy.repeated_layers():
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = forward


def check_base(policy: Policy, base: str | None, *, source: str) -> None:
    """Refuse, by a ConfigError, weights that were trained on another base than the policy has."""
    if base is not None and base != policy.base:
        raise ConfigError(
            f"{source} was trained from other weights ({base}) than the model has now "
            f"({policy.base}); nearest: the model that it was trained from",
            key="model.path",
        )


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float | Tensor) -> Tensor:
    """W + s · B A, computed in float32.

    Args:
        weight: [out, in].
        first: A, [rank, in].
        second: B, [out, rank].
        scale: s.
    """
    return (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)


def merged_adapters(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in which adapters ``X.lora_A`` stand for matrices ``X.weight`` of a base, with these
    matrices in place of the adapters."""
    found = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name in tensors:
        layer, is_part, kind = name.rpartition(".lora_")
        if is_part and kind == "A":
            parts = (tensors[f"{layer}.lora_{each}"] for each in ("A", "B", "scale"))
            found[f"{layer}.weight"] = merged(base[f"{layer}.weight"], *parts)
    return found


def read_weights(path: Path, *, key: str = "model.path") -> dict[str, Tensor]:
    """What a run left behind in a file; a ConfigError where it holds no weights."""
    try:
        return safetensors.torch.load_file(path.expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} holds no weights: {error}", key=key) from error


def load_initial_weights(policy: Policy, path: Path) -> None:
    """Let a policy begin with the weights of a file.

    The critic begins afresh where the file holds none, as that of a policy which has imitated;
    what the file leaves out of a policy with a :attr:`~Policy.base` is as the base has it, and the
    file becomes part of the base. ConfigError, and nothing changed, where it holds other tensors
    than the policy has, or only a part of what was trained from another base.
    """
    key = "model.path" if policy.base is None else "model.weights"
    found = read_weights(path, key=key)
    with safetensors.safe_open(path.expanduser(), "pt") as file:
        base = (file.metadata() or {}).get(BASE)
    own = policy.state_dict()
    of_values = {id(parameter) for parameter in policy.value_parameters()}
    critic = {name for name, each in policy.named_parameters() if id(each) in of_values}
    if policy.base is not None and own.keys() - critic - found.keys():
        check_base(policy, base, source=str(path))
        found = merged_adapters(found, own)
        own = {name: tensor for name, tensor in own.items() if name in found} if base else own
    if not critic & found.keys():
        own = {name: tensor for name, tensor in own.items() if name not in critic}
    try:
        check_compatible(own, found, source=str(path))
    except CheckpointError as error:
        raise ConfigError(str(error), key=key) from error
    policy.load_state_dict(found, strict=False)
    if policy.base is not None:
        with path.expanduser().open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        policy.base = f"{policy.base}, then sha256:{digest}"


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
