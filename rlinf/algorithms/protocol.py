"""What an algorithm offers to the trainer, and what passes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.algorithms.batch import Batch
from rlinf.data.trajectory import Trajectory
from rlinf.errors import RunFailure

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.config import ModelConfig

T = TypeVar("T")


class Evaluation(Protocol):
    """The terms of a batch under the present weights of a policy."""

    @property
    def log_probs(self) -> Tensor:
        """[N, K], or of action dimensions [N, C, A]."""

    @property
    def values(self) -> Tensor | None:
        """[N, V] of a policy that has a critic of its own."""

    @property
    def entropy(self) -> Tensor | None:
        """Shaped as ``log_probs``, in nats; None where it was not asked for."""


@dataclass(frozen=True)
class Scores:
    """An :class:`Evaluation` of tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


Modules = Mapping[str, nn.Module]
"""What an algorithm trains, and what follows it, by name. ``policy`` is called with a batch and
gives an :class:`Evaluation`; ``critic``, where the policy has no values of its own, is called with
a batch of answers and gives [N, L]."""
Share = tuple[Tensor, dict[str, Tensor]]
"""Of a micro batch: a scalar loss, and scalars without gradient."""


@dataclass(frozen=True)
class Loss:
    """One loss, with an optimizer step of its own.

    Args:
        name: ``policy``, ``critic``, …
        parameters: Names of the modules that it trains.
        of: Share of a micro batch in the loss of its global batch, and in metrics, from the
            modules, the micro batch and the normaliser of the global batch; all are summed over
            micro batches and ranks.
    """

    name: str
    parameters: tuple[str, ...]
    of: Callable[[Modules, Batch, float], Share]


class Algorithm(ABC):
    """Credit and losses of one algorithm, and what data they need.

    Order of calls in a step: :meth:`keep_group` as groups arrive; :meth:`prepare` once; for each
    global batch :meth:`normalizer`, the :meth:`losses` of its micro batches, :meth:`accepts` with
    their summed metrics, :meth:`after_update`.
    """

    needs_values: bool = False
    """Whether a critic must be trained and batches must carry its values."""
    needs_reference: bool = False
    """Whether batches must carry log-probs of the reference policy."""
    reference_weights: Path | None = None
    """File of the reference policy; None: it is the policy that the run began with."""
    needs_proximal: bool = False
    """Whether batches must carry log-probs that the trainer recomputed."""
    needs_entropy: bool = False
    """Whether a policy for tokens must give the entropy."""
    reads_log_probs: bool = True
    """Whether losses read log-probs of the policy, in which rollout and trainer must then agree."""
    averages: bool = False
    """Whether those who act have weights that follow the trained ones, by :meth:`share`."""
    asked: tuple[str, ...] = ()
    """Names in ``inputs`` of what :meth:`ask` finds out before the first update."""
    needs_present: bool = False
    """Whether a rollout of older weights comes with what the present ones make of it, by
    :meth:`prepare_stale`."""

    def keep_group(self, rewards: np.ndarray, valid: np.ndarray | None = None) -> bool:
        """Whether a group of answers, of rewards [G] and ``valid`` [G] bool (None: all), is worth
        training on; if not, another one is drawn."""
        del rewards, valid
        return True

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is trained in this step of the run, counted from 0."""
        del step
        return True

    def trains_values_alone(self, step: int) -> bool:
        """Whether in this step of the run all of a policy that acts stays as it is but the
        parameters that only its values depend on."""
        del step
        return False

    def begin_phase(self, step: int) -> None:
        """Get ready for the training phase of this number, from 0."""

    def modules(self, model: ModelConfig, env_spec: EnvSpec, *, seed: int) -> dict[str, nn.Module]:
        """What is trained for actions, and what follows it, by name, with fresh weights."""
        values = self.value_dim(model.num_action_chunks)
        return {"policy": model.build(env_spec, value_dim=values, seed=seed)}

    def value_dim(self, chunk: int) -> int:
        """V that a policy for chunks of ``chunk`` primitive actions must have; 0: no critic."""
        del chunk
        return 0

    @abstractmethod
    def prepare(self, rollout: Trajectory | Batch) -> tuple[Batch, dict[str, float]]:
        """Give a whole rollout, of chunk steps or of groups of answers, its credit; metrics too.

        Rows of a trajectory that a fault spoilt are left out. In a batch of answers ``mask``
        becomes 0 for whole sequences that are not trained on. Running statistics are updated. A
        ValueError says what the rollout lacks.
        """

    def prepare_stale(
        self, trajectory: Trajectory, present: Evaluation
    ) -> tuple[Batch, dict[str, float]]:
        """As :meth:`prepare`, for a rollout in which older weights acted; ``present`` is what the
        weights that the phase begins with make of its actions, each [T, B, ...]."""
        del present
        return self.prepare(trajectory)

    def with_noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch drawn from a replay with the random numbers that its losses need.

        They are drawn for whole batches, so that losses do not depend on how ranks divide them.
        """
        del generator
        return batch

    def ask(self, modules: Modules, batch: Batch) -> Sequence[Tensor]:
        """What the weights that act say of a micro batch of a prepared rollout, each [n, ...] under
        the names of :attr:`asked`; the noise of the policy's supervised loss is in its inputs."""
        raise NotImplementedError(f"{type(self).__name__} asks nothing")

    def share(self, step: int) -> float:
        """How much of the trained weights those who act take over after phase ``step``, from 0;
        1: they act with the trained ones."""
        del step
        return 1.0

    @abstractmethod
    def normalizer(self, batch: Batch) -> float:
        """Of the losses of a prepared global batch, over all ranks; goes to its micro batches."""

    def losses(self) -> tuple[Loss, ...]:
        """What is trained, in the order of the optimizer steps on one global batch."""
        return (Loss("policy", ("policy",), self._of_policy),)

    def _of_policy(self, modules: Modules, batch: Batch, normalizer: float) -> Share:
        return self.loss(modules["policy"](batch), batch, normalizer=normalizer)

    def loss(self, evaluation: Evaluation, batch: Batch, *, normalizer: float) -> Share:
        """Share of a prepared micro batch, under the present weights, in the loss of the policy.

        Summed over micro batches loss and metrics are those of the global batch, of which the
        normaliser is, whatever the split. A ValueError says what the batch lacks.

        Returns:
            Scalar loss, and scalars without gradient; ``actor/approx_kl`` among them where
            ``actor.target_kl`` is to end a phase early.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss of a policy alone")

    def value_loss(self, values: Tensor, batch: Batch, *, normalizer: float) -> Share:
        """As :meth:`loss`, of a critic that gave ``values`` [n, V]."""
        raise NotImplementedError(f"{type(self).__name__} has no critic")

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether an update of the policy whose loss has these metrics may be applied."""
        del metrics
        return True

    def after_update(self, modules: Modules) -> None:
        """Change modules that no loss trains, such as target networks, after each global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Running statistics; a tree of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


def require_prepared(found: object, by: Algorithm) -> tuple[Batch, dict[str, float]]:
    """What :meth:`Algorithm.prepare` returned; a RunFailure where it is no batch with metrics, or
    its advantages are of other terms."""
    who = f"`prepare` of {type(by).__name__}"
    batch, metrics = _with_metrics(found, Batch, who)
    shape, terms = tuple(getattr(batch.advantages, "shape", ())), tuple(batch.mask.shape)
    if shape not in ((), terms, (len(batch), 1)):
        raise RunFailure(f"{who} gives advantages {shape} for terms [N, K] of shape {terms}")
    return batch, metrics


def require_share(found: object, by: Algorithm, loss: Loss) -> Share:
    """What a loss returned of a micro batch; a RunFailure where it is no scalar with gradient and
    scalars."""
    who = f"the loss `{loss.name}` of {type(by).__name__}"
    value, metrics = _with_metrics(found, Tensor, who)
    if value.ndim:
        shape = tuple(value.shape)
        raise RunFailure(f"{who} is {shape}, not a scalar: sum it, and divide by the normalizer")
    if not value.requires_grad:
        raise RunFailure(f"{who} has no gradient: nothing that it reads depends on what is trained")
    for name, metric in metrics.items():
        if not (isinstance(metric, Tensor) and metric.ndim == 0):
            what = f"the metric `{name}` as {_kind(metric)}"
            raise RunFailure(f"{who} gives {what}, not as a scalar Tensor")
    return value, metrics


def _with_metrics(found: object, kind: type[T], who: str) -> tuple[T, dict[str, Any]]:
    match found:
        case (value, dict() as metrics) if isinstance(value, kind):
            return value, metrics
    what = f"not a {kind.__name__} and a dict of metrics"
    raise RunFailure(f"{who} returns {_kind(found)}, {what}")


def _kind(found: object) -> str:
    """What something is, in words."""
    if isinstance(found, tuple):
        return f"({', '.join(map(_kind, found))})"
    shape = f" {tuple(found.shape)}" if isinstance(found, Tensor) else ""
    return f"{type(found).__name__}{shape}"
