"""Actor worker: trains the policy on what the environments and the rollout policy produced."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from rlinf.algorithms.registry import build_algorithm
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.spec import EnvSpec
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.registry import build_policy
from rlinf.trainers.modules import POLICY
from rlinf.trainers.ranks import Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer
from rlinf.workers.acting_config import OnPolicyConfig
from rlinf.workers.context import WorkerContext


class ActorWorker(StageWorker):
    """One data-parallel rank of the trainer."""

    def __init__(self, config: OnPolicyConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._trainer: Trainer

    def start(self, env_spec: EnvSpec) -> dict[str, int]:
        """Build policy and trainer; returns the number of parameters."""
        config = self._config
        policy = build_policy(config.model, env_spec, value_dim=config.value_dim, seed=config.seed)
        self._trainer = Trainer(
            {POLICY: policy},
            build_algorithm(config.algorithm, group_size=config.group_size),
            config.actor,
            ranks=Replicas(
                self._rank,
                self._world_size,
                device=self.compute_device,
                all_reduce=self._all_reduce if self._world_size > 1 else None,
            ),
            rows=config.samples,
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._context.failures,
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

    def send_weights(self) -> int:
        """Broadcast the weights from rank 0 to every rollout worker; returns their version."""
        weights = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self._trainer.weights()
        }
        if self._rank == 0:
            receivers = list(range(self._config.world_size("rollout")))
            self.broadcast(
                (weights, self._trainer.version),
                groups=[(self._group_name, 0), ("rollout", receivers)],
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
