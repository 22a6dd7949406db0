"""Replay worker: keeps what the environments showed, and draws batches to train on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import require_prepared
from rlinf.data.replay import ReplayStore, draws
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.results import TASK_IDS
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.workers.config.off_policy import OffPolicyConfig
from rlinf.workers.context import WorkerContext


class ReplayWorker(StageWorker):
    """The one memory of a run; which rows it draws depends on run seed and step alone."""

    records = (Batch,)

    def __init__(self, config: OffPolicyConfig, context: WorkerContext) -> None:
        super().__init__()
        del context
        self._config = config
        self._algorithm = config.algorithm.build()
        self._store = ReplayStore(config.replay.capacity)

    def start(self) -> None:
        """Nothing is built before the first transitions say what they look like."""

    def sample(
        self, trajectories: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: take a rollout in, then yield its states and the global batches of one training
        phase."""
        config = self._config
        parts = [Trajectory.from_arrays(item.payload) for item in trajectories]
        found = self._algorithm.prepare(concatenate(parts))
        rows, metrics = require_prepared(found, self._algorithm)
        self._store.append(rows.tensors())
        states = {name: rows.inputs[name] for name in ("states", TASK_IDS) if name in rows.inputs}
        if states:
            yield Emit("seen", 0, states)
        generator = draws(config.seed, step)
        for number in range(config.updates(step)):
            drawn = self._store.sample(config.actor.global_batch_size, generator)
            batch = self._algorithm.with_noise(Batch.from_tensors(drawn), generator)
            yield Emit("batches", number, batch)
        return {"replay/transitions": float(len(self._store)), **metrics}

    def state(self) -> dict[str, Any]:
        """Every transition, see :meth:`ReplayStore.state_dict`."""
        return self._store.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._store.load_state_dict(state)
