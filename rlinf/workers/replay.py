"""Replay worker: keeps what the environments showed, and draws batches to train on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import require_prepared
from rlinf.algorithms.sac import NEXT
from rlinf.data.replay import ReplayStore, Rows, draws
from rlinf.data.trajectory import Trajectory, concatenate
from rlinf.envs.results import TASK_IDS
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.planner.cluster_shape import free_memory, total_memory
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
        self._unread: set[str] = set()

    def start(self, env_spec: EnvSpec) -> None:
        """Nothing is built before the first transitions say what they look like, but a capacity
        that this machine has no room for is refused.

        Raises:
            ConfigError: With the nearest capacity.
        """
        config, capacity = self._config, self._config.replay.capacity
        unread = config.model.unread(env_spec.seen_by_cameras)
        self._unread = {f"inputs.{prefix}{name}" for name in unread for prefix in ("", NEXT)}
        kept = env_spec.showing(env_spec.observation_shapes.keys() - set(unread))
        size, free = transition_bytes(kept, config.model.num_action_chunks), free_memory()
        filled = min(capacity, config.training_steps * config.samples)
        if filled * size > free or capacity * size > total_memory():
            shown = ", ".join(kept.pictures) or ", ".join(kept.observation_shapes)
            raise ConfigError(
                f"{capacity} transitions of {size / 1e3:.3g} kB, with {shown} before and after the "
                f"action, take {capacity * size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free; "
                f"nearest: {max(free // size, config.samples)}, or smaller observations",
                key="replay.capacity",
            )

    def sample(
        self, trajectories: InputStream, *, step: int
    ) -> Generator[Emit, None, dict[str, float]]:
        """Stage: take a rollout in, then yield its states and the global batches of one training
        phase."""
        config = self._config
        parts = [Trajectory.from_arrays(item.payload) for item in trajectories]
        found = self._algorithm.prepare(concatenate(parts))
        rows, metrics = require_prepared(found, self._algorithm)
        self._store.append(self._kept(rows.tensors()))
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
        self._store.load_state_dict({part: self._kept(rows) for part, rows in state.items()})

    def _kept(self, rows: Rows) -> dict[str, Tensor]:
        """Rows without pictures that the policy does not read, which replay and rollouts under way
        of runs that were begun earlier hold."""
        return {name: each for name, each in rows.items() if name not in self._unread}


def transition_bytes(env_spec: EnvSpec, chunk: int) -> int:
    """What a transition takes at least: what was seen before and after a chunk of C = ``chunk``
    actions, and these [bytes]."""
    types = env_spec.observation_dtypes
    seen = sum(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(types[name]).itemsize
        for name, shape in env_spec.observation_shapes.items()
    )
    return 2 * seen + 4 * chunk * env_spec.action_dim
