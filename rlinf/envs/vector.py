"""A batch of environments: what rollouts, recordings and evaluations act in.

Supervised processes (:mod:`rlinf.envs.supervised`) are one implementation; a simulator that steps
a whole batch on a device, or a world model, is another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from rlinf.envs.results import EpisodeRecord, Observations, VectorStep
from rlinf.envs.spec import EnvSpec


class VectorEnv(ABC):
    """N envs that are stepped together by action chunks; not thread-safe."""

    num_envs: int
    first_env: int
    """Global number of the first env; seeds depend on global numbers alone."""
    stages: int
    """Stage ``s`` is the contiguous slice ``s`` of the envs; several can be in flight at once."""

    @property
    @abstractmethod
    def env_spec(self) -> EnvSpec:
        """What a policy must know of the envs."""

    @property
    @abstractmethod
    def task_resets(self) -> np.ndarray:
        """[tasks, 3] int64: resets of each task that failed and that went well, and episodes that
        the next task was given, because this one is left out."""

    @abstractmethod
    def reset(self, stage: int = 0) -> Observations:
        """Start a new epoch in the envs of ``stage`` and return their observations [n, ...].

        Raises:
            RunFailure: An env cannot be reset, or too many episodes are faulty.
        """

    @abstractmethod
    def observations(self, stage: int = 0) -> Observations:
        """Return a copy of the present observations of ``stage``, by key [n, ...]."""

    @abstractmethod
    def send(self, actions: np.ndarray, stage: int = 0) -> None:
        """Begin one action chunk [n, C, A] in the envs of ``stage``; a discrete A is the index."""

    @abstractmethod
    def receive(self, stage: int = 0) -> VectorStep:
        """Wait for the chunk in flight in ``stage`` and return what followed.

        Raises:
            RunFailure: Too many of the recent episodes were faulty, or the envs cannot go on.
        """

    @abstractmethod
    def exhausted(self, stage: int = 0) -> bool:
        """Return whether every env of ``stage`` has played its share of the episode list."""

    @abstractmethod
    def unfinished(self) -> list[EpisodeRecord]:
        """Return the records, as they are now, of the episodes that a reset would cut; one in which
        nothing was done yet is none."""

    @abstractmethod
    def assign_episodes(self, episode_seeds: Sequence[tuple[int, ...]]) -> None:
        """Replace the list of (episode id, seed); :meth:`reset` starts to walk it."""

    @abstractmethod
    def render(self, env: int = 0) -> np.ndarray:
        """Return a picture of the ``env``-th env of this batch, uint8 [H, W, 3]."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that the envs need to go on as if never stopped.

        Nested dictionaries of arrays, ints and text: counters, seeds, observations, the actions of
        the running episodes and, where the simulator can give it, its state.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, bitwise.

        Raises:
            CheckpointError: The state is that of other envs.
        """

    @abstractmethod
    def close(self) -> None:
        """End the envs and give their memory back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chunk_step(self, actions: np.ndarray, stage: int = 0) -> VectorStep:
        """Execute one action chunk [n, C, A] and return what followed.

        Inside a chunk no env is reset. When an episode ends there, its remaining actions are not
        executed and earn 0; the flags stand in the last column; after the chunk the env is reset
        (``auto_reset``) and ``final_observations`` holds what it showed at the end.
        """
        self.send(actions, stage)
        return self.receive(stage)

    def step(
        self, actions: np.ndarray, stage: int = 0
    ) -> tuple[Observations, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute one primitive action [n, A], in the form of ``gymnasium.vector``."""
        result = self.chunk_step(np.asarray(actions)[:, None], stage)
        infos = {
            "final_observation": result.final_observations,
            "_final_observation": result.final_mask,
            "valid": result.valid,
            "episodes": result.episodes,
        }
        return (
            result.observations,
            result.rewards[:, 0],
            result.terminations[:, 0],
            result.truncations[:, 0],
            infos,
        )

    @property
    def single_observation_space(self) -> spaces.Dict:
        """The gymnasium space of one observation."""
        spec = self.env_spec
        entries: dict[str, spaces.Space[Any]] = {}
        for key, shape in spec.observation_shapes.items():
            dtype = np.dtype(spec.observation_dtypes[key])
            low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
            entries[key] = spaces.Box(low, high, shape, dtype.type)
        return spaces.Dict(entries)

    @property
    def single_action_space(self) -> spaces.Box | spaces.Discrete | spaces.MultiDiscrete:
        """The gymnasium space of one primitive action."""
        spec = self.env_spec
        if spec.choices is not None:
            several = len(spec.choices) > 1
            return (
                spaces.MultiDiscrete(list(spec.choices))
                if several
                else spaces.Discrete(spec.choices[0])
            )
        low, high = (np.array(x, np.float32) for x in (spec.action_low, spec.action_high))
        return spaces.Box(low, high, dtype=np.float32)
