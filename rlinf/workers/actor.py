"""Actor worker: trains the policy on what the environments and the rollout policy produced."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.objective import PolicyObjective
from rlinf.algorithms.supervised import (
    Supervised,
    check_objective,
    imitated,
    with_demonstrations,
    with_noise,
)
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.policy import told_elsewhere
from rlinf.trainers.modules import POLICY
from rlinf.trainers.ranks import Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer
from rlinf.workers.config.acting import ActingConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.training_ranks import WeightSendingWorker

_OF_DEMONSTRATIONS = 2
"""Last word of their noise: other numbers than a rollout, 0, and what a trainer asks for, 1."""


@dataclass(frozen=True)
class _Sum:
    """Of one rank or of all. Nobody changes it: on the local runtime it is passed as it is."""

    values: torch.Tensor


class ActorWorker(WeightSendingWorker):
    """One data-parallel rank of the trainer."""

    def __init__(self, config: ActingConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context

    def start(self, env_spec: EnvSpec, rendezvous: str | None = None) -> dict[str, Any]:
        """Build policy and trainer; returns the number of parameters and, where it imitates, which
        recorded actions are learnt together."""
        config = self._config
        algorithm = config.algorithm.build(group_size=config.group_size)
        with told_elsewhere(self._rank > 0):
            modules = algorithm.modules(config.model, env_spec, seed=config.seed)
        self._imitate(algorithm, modules.get(POLICY))
        self._trainer = Trainer(
            modules,
            algorithm,
            config.actor,
            ranks=self._meet(rendezvous) if config.actor.type == "fsdp" else self._replicas(),
            optim=config.optimizers,
            rows=config.samples,
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._context.failures,
        )
        self._open_weights()
        trained = (p for each in modules.values() for p in each.parameters() if p.requires_grad)
        found: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in trained)}
        if (shown := getattr(config, "demonstrations", None)) is not None:
            found["imitated"] = imitated(modules[POLICY], shown.objective)
        return found

    def _imitate(self, algorithm: Any, policy: Any) -> None:
        """Let the algorithm go on imitating what was recorded, where the recipe says so."""
        shown = getattr(self._config, "demonstrations", None)
        if shown is None:
            return
        key = "demonstrations.objective"
        check_objective(policy, shown.objective, model=self._config.model.type, key=key)
        if not isinstance(algorithm, PolicyObjective):
            raise ConfigError(
                f"{self._config.algorithm.type} imitates nothing beside its own loss; nearest: ppo",
                key="demonstrations",
            )
        algorithm.imitation = Supervised(shown.objective)
        self._noise = policy.imitation_noise if shown.objective == "model" else {}

    def _replicas(self) -> Replicas:
        return Replicas(
            self._rank,
            self._world_size,
            device=self.compute_device,
            all_reduce=self._all_reduce if self._world_size > 1 else None,
        )

    def train(
        self, trajectories: InputStream, demonstrations: InputStream | None = None, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on the trajectories of one rollout, with recorded chunks beside its rows;
        returns the phase's metrics."""
        parts = [Trajectory.from_arrays(item.payload) for item in trajectories]
        yield from ()  # a stage is a generator, also one that yields nothing
        rollout = concatenate(parts).to(self.compute_device)
        if demonstrations is None:
            return self._trainer.learn(rollout, step)
        config: Any = self._config
        drawn: Batch = next(demonstrations).payload
        shown = with_noise(drawn, self._noise, (config.seed, step, 0, _OF_DEMONSTRATIONS))

        def beside(batch: Batch) -> Batch:
            weight, rows = config.demonstrations.weight, config.actor.global_batch_size
            return with_demonstrations(batch, shown, weight=weight, rows=rows)

        return self._trainer.learn(rollout, step, beside)

    def train_on(
        self, batches: InputStream, seen: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: train on global batches that come one by one; returns the phase's metrics.

        Statistics of observations are taken of every state that was seen, once, and afterwards, so
        that those who act and the trainer compute with equal ones.
        """
        yield from ()
        metrics = self._trainer.train((item.payload for item in batches), step)
        for item in seen:
            self._trainer.observe(item.payload)
        return metrics

    def _all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in rank order: gathered and summed on rank 0, then broadcast."""
        everyone = [(self._group_name, list(range(self._world_size)))]
        if self._rank > 0:
            self.send(_Sum(part), self._group_name, 0)
            everything: _Sum = self.broadcast(None, groups=everyone)
            return everything.values
        others = [self.recv(self._group_name, rank) for rank in range(1, self._world_size)]
        total = sum_ranks([part, *(other.values for other in others)])
        self.broadcast(_Sum(total), groups=everyone)
        return total
