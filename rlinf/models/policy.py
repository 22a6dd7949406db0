"""What every policy for actions offers to rollout and training."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.results import ACTION_MASK
from rlinf.errors import ConfigError, RunFailure

RAW_ACTIONS = "raw_actions"
"""Name in ``forward_inputs`` of the sampled actions before they were clipped to the box."""
RECORDED = "recorded"
"""Name of [N, C] bool, which of the actions to be imitated were recorded; the others fill a chunk
beyond the end of its episode."""

_LITTLE = 10_000_000
"""Parameters times rows up to which a forward pass gains little by a second core: it takes half a
millisecond on one."""

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


def drawn_in_evaluation(policy: Policy) -> Mapping[str, NoiseSpec]:
    """:attr:`Policy.evaluation_noise`; ConfigError where it is empty."""
    if not policy.evaluation_noise:
        raise ConfigError(
            f"{type(policy).__name__} has nothing to draw: it gives one action for what it sees; "
            "legal: true, or a server with --mode",
            key="evaluation.deterministic",
        )
    return policy.evaluation_noise


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


_TOLD_ELSEWHERE = ContextVar("told elsewhere", default=False)


@contextmanager
def told_elsewhere(told: bool = True) -> Iterator[None]:
    """Of a policy that is built within, warnings are those of another worker of the run."""
    before = _TOLD_ELSEWHERE.set(told)
    try:
        yield
    finally:
        _TOLD_ELSEWHERE.reset(before)


def warn_of_policy(log: logging.Logger, message: str, *words: object) -> None:
    """Log a warning of a policy that is being built, once for a run."""
    if not _TOLD_ELSEWHERE.get():
        log.warning(message, *words)


def owned(output: Tensor) -> Tensor:
    """No view, of which FSDP2 warns: what is written to one loses its gradients. It is small."""
    return output.clone() if output._is_view() else output


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
    state_scaling: str | None = None
    """See :attr:`~rlinf.models.config.ModelConfig.state_scaling`."""
    critic_parts: ClassVar[tuple[str, ...]] = ("critic", "critic_encoder", "value_head")
    """What only values come from, by the first word of the names of its tensors."""
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

    @property
    def evaluation_noise(self) -> Mapping[str, NoiseSpec]:
        """What :meth:`sample` is given in an evaluation that draws actions, without what is for
        exploration alone; empty where nothing is drawn then."""
        return self.noise

    @abstractmethod
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act on observations, each [B, ...], without gradients.

        The noise is as :attr:`noise` or :attr:`evaluation_noise` says, each [B, ...]; None takes
        the mode of the distribution.
        """

    @abstractmethod
    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs, values and entropy of stored actions, with gradients.

        The inputs are the observations and what :meth:`sample` returned as such, each [B, ...].
        """

    @property
    def imitated(self) -> tuple[int, int]:
        """Recorded actions that :meth:`imitation_errors` is given of each row, I of them: how many
        before the present step, and how many from it on. A model that gives more actions at once
        than are executed learns all of them: it must not see those that it need not find."""
        return 0, self.chunk

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """What :meth:`imitation_errors` needs, by name."""
        return {}

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, I, A] errors of recorded actions by the supervised loss of the model, with gradients.

        The inputs are observations, ``raw_actions`` [N, I, A] in the units of the environment, the
        noise that it needs, and, where some actions only fill a chunk, ``recorded`` [N, I].
        """
        raise NotImplementedError(f"{type(self).__name__} has no supervised loss of its own")

    def repeated_layers(self) -> list[torch.nn.Module]:
        """The layers that ranks gather one after another where they divide the policy."""
        return repeated_layers(self)

    def forward(self, batch: Any, *, imitate: bool = False, mode: bool = False) -> Any:
        """Actions of a :class:`~rlinf.algorithms.batch.Batch` under the present weights, as an
        :class:`ActionEvaluation`; with ``imitate`` their :meth:`imitation_errors`, with ``mode``
        the most likely actions [B, C, A] of a policy that has them in closed form."""
        if imitate:
            recorded = (batch.mask > 0).view(len(batch.mask), sum(self.imitated), -1).any(dim=-1)
            return owned(self.imitation_errors({**batch.inputs, RECORDED: recorded}))
        if mode:
            # Not of every policy.
            return owned(self.mode(batch.inputs))  # type: ignore[operator]
        found, inputs = self.evaluate_actions(batch.inputs), batch.inputs
        log_probs, entropy = found.log_probs, found.entropy
        if ACTION_MASK in inputs:
            log_probs = of_own_dimensions(log_probs, inputs)
            entropy = of_own_dimensions(entropy, inputs)
        values = owned(found.values)
        return replace(found, log_probs=owned(log_probs), values=values, entropy=owned(entropy))

    @abstractmethod
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""

    @abstractmethod
    def value_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that only the values depend on; they may have their own learning rate."""

    def acts_on(self, observations: Collection[str]) -> tuple[str, ...]:
        """Those of the observations by name that acting needs; a server asks for no others."""
        return tuple(observations)

    def critic_state(self) -> set[str]:
        """Names in the state of what only the critic has, and a policy that imitates does not."""
        of_values = {id(parameter) for parameter in self.value_parameters()}
        return {name for name, each in self.named_parameters() if id(each) in of_values}

    def began_from(self, base: str | None) -> bool:
        """Whether weights that were trained from this base are of the policy's :attr:`base`."""
        return base == self.base

    def refuse_unknown_tensors(self, names: Iterable[str]) -> None:
        """Say, by a CheckpointError, why a checkpoint has tensors of these names that the policy
        has not, where that is known."""
        del names

    def adapted_layers(self) -> Iterator[str]:
        """Names of the linear layers that adapters wrap: all but those of the values, which begin
        afresh and are trained whole, and those whose weights an embedding has, too."""
        of_values = {id(parameter) for parameter in self.value_parameters()}
        tied = tied_to_embedding(self)
        for name, part in self.named_modules():
            if not isinstance(part, torch.nn.Linear) or name in tied:
                continue
            if id(part.weight) not in of_values:
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


class ActingThreads:
    """Threads with which a policy acts: one where it computes little, otherwise those that the
    calling thread has now.

    Threads that wait for the next operation keep cores busy on which simulators are at work then.
    """

    def __init__(self, policy: Policy) -> None:
        self._few = _LITTLE // max(1, sum(each.numel() for each in policy.parameters()))
        self._usual = torch.get_num_threads()

    def choose(self, rows: int) -> None:
        """Let the calling thread compute the actions of so many environments."""
        threads = 1 if rows <= self._few else self._usual
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def require_finite(
    actions: np.ndarray, policy: torch.nn.Module, seen: Mapping[str, Tensor], *, kind: str
) -> None:
    """Refuse actions [B, C, A] that are no numbers, which a simulator would answer with
    observations that are none; ``seen`` is what the policy of this ``kind`` answered.

    Raises:
        RunFailure: Names what was not finite first: what was seen, the weights, or what the model
            computes of both.
    """
    good = np.isfinite(actions)
    if good.all():
        return
    rows = f"{int((~good).any(axis=(1, 2)).sum())} of {len(actions)} rows"
    blind = [name for name, each in seen.items() if not bool(each.isfinite().all())]
    weights = dict(policy.named_parameters())
    broken = [name for name, each in weights.items() if not bool(each.isfinite().all())]
    # Their bounds may be infinite.
    broken += [name for name, each in policy.named_buffers() if bool(each.isnan().any())]
    if blind:
        cause = f"`{blind[0]}`, which it saw, holds a NaN or an infinity"
    elif broken:
        cause = (
            f"what it saw is finite, but {len(broken)} tensors of the model are not, first "
            f"`{broken[0]}`: begin from other weights, or lower actor.optim.lr"
        )
    else:
        cause = (
            "what it saw and its weights are finite, so it is the model that computes them: look "
            f"at it with `rlinf check model {kind}`, or lower actor.optim.lr where weights grew"
        )
    raise RunFailure(f"the policy `{kind}` gives no finite actions in {rows}: {cause}")


def repeated_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The longest list of modules in a module: its layers."""
    lists = [list(part) for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def tied_to_embedding(module: torch.nn.Module) -> set[str]:
    """Names of the linear layers whose weights are those of an embedding, too: an adapter of such a
    layer alone cannot be merged into them."""
    parts = dict(module.named_modules())
    embeddings = {id(e.weight) for e in parts.values() if isinstance(e, torch.nn.Embedding)}
    return {
        name
        for name, part in parts.items()
        if isinstance(part, torch.nn.Linear) and id(part.weight) in embeddings
    }


def checkpoint_layers(policy: Policy) -> None:
    """Let each repeated layer keep only its inputs for the backward pass, and compute the rest
    again there."""
    from torch.utils.checkpoint import checkpoint

    for layer in policy.repeated_layers():
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = forward
