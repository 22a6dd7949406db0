"""Actor worker: trains the policy on what the environments and the rollout policy produced."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.algorithms.registry import AlgorithmConfig, build_algorithm
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.spec import EnvSpec
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.registry import ModelConfig, build_policy
from rlinf.trainers.config import ActorConfig
from rlinf.trainers.modules import POLICY
from rlinf.trainers.ranks import Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer


@dataclass(frozen=True)
class ActorSetup:
    """What an actor worker needs to build its trainer.

    Args:
        model: Configuration of the policy.
        algorithm: Configuration of the algorithm.
        actor: Batch sizes and optimizer.
        seed: Seed of the initial weights and of the order of samples.
        samples: Valid samples that one rollout trains on.
        total_steps: Training phases of the run.
        group_size: Consecutive environments that share their reset states.
    """

    model: ModelConfig
    algorithm: AlgorithmConfig
    actor: ActorConfig
    seed: int
    samples: int
    total_steps: int
    group_size: int


class ActorWorker(StageWorker):
    """One data-parallel rank of the trainer."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__()
        self._setup = setup
        self._trainer: Trainer

    def start(self, env_spec: EnvSpec) -> dict[str, int]:
        """Build policy and trainer; returns the number of parameters."""
        setup = self._setup
        algorithm = build_algorithm(setup.algorithm, group_size=setup.group_size)
        policy = build_policy(
            setup.model,
            env_spec,
            value_dim=algorithm.value_dim(setup.model.num_action_chunks),
            seed=setup.seed,
        )
        self._trainer = Trainer(
            {POLICY: policy},
            algorithm,
            setup.actor,
            ranks=Replicas(
                self._rank,
                self._world_size,
                device=self.compute_device,
                all_reduce=self._all_reduce if self._world_size > 1 else None,
            ),
            rows=setup.samples,
            total_steps=setup.total_steps,
            seed=setup.seed,
        )
        return {"parameters": sum(p.numel() for p in policy.parameters())}

    def train(
        self, trajectories: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on the trajectories of one rollout; returns the phase's metrics.

        Args:
            trajectories: Stream of :class:`Trajectory`, one per sub-batch of environments.
            step: Number of the training phase.
        """
        parts: list[Trajectory] = [item.payload for item in trajectories]
        yield from ()  # a stage is a generator, also one that yields nothing
        return self._trainer.learn(concatenate(parts).to(self.compute_device), step)

    def send_weights(self, receiver: str, receivers: int) -> int:
        """Broadcast the weights from rank 0 to every rollout worker; returns their version."""
        weights = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self._trainer.weights()
        }
        if self._rank == 0:
            self.broadcast(
                (weights, self._trainer.version),
                groups=[(self._group_name, 0), (receiver, list(range(receivers)))],
            )
        return self._trainer.version

    def _all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in rank order: gathered and summed on rank 0, then broadcast."""
        everyone = [(self._group_name, list(range(self._world_size)))]
        if self._rank > 0:
            self.send(part, self._group_name, 0)
            total: torch.Tensor = self.broadcast(None, groups=everyone)
            return total
        parts = [part, *(self.recv(self._group_name, r) for r in range(1, self._world_size))]
        total = sum_ranks(parts)
        self.broadcast(total, groups=everyone)
        return total

    def state(self) -> dict[str, Any] | None:
        """Everything that training needs to continue; rank 0 gives it."""
        state = self._trainer.state_dict()
        return {"trainer": state} if self._rank == 0 else None

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._trainer.load_state_dict(state["trainer"])
