"""Envs of several simulators in one batch: each section of ``env.train`` has processes of its own.

What the sections show and take is padded to the largest: states with zeros, and of the actions each
section is given its own first dimensions, within its own limits. What is padded counts for nothing;
where sections take different actions, ``action_mask`` says in the observations which dimensions a
row has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf.config.nearest import join_choices, nearest_multiples
from rlinf.envs.base import VECTORS
from rlinf.envs.config import EnvConfig, Shares
from rlinf.envs.observation_names import present
from rlinf.envs.results import ACTION_MASK, TASK_IDS, EpisodeRecord, Observations, VectorStep
from rlinf.envs.spec import EnvSpec, joined
from rlinf.envs.supervised.block import reshard
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.envs.vector import VectorEnv
from rlinf.errors import CheckpointError, ConfigError, RunFailure, in_section

_COLUMNS = (
    "rewards", "terminations", "truncations", "valid", "active", "episode_ids", "reset_seeds",
)  # fmt: skip


def vector_env(sections: Mapping[str, EnvConfig], **settings: Any) -> VectorEnv:
    """The envs of one section, or of several together.

    Args:
        sections: By their keys in the recipe.
        settings: Of :class:`~rlinf.envs.supervised.vector.SupervisedVectorEnv`.
    """
    if len(sections) > 1:
        return MixedVectorEnv(sections, **settings)
    ((key, config),) = sections.items()
    with in_section(key):
        return SupervisedVectorEnv(config, section=key, **settings)


class MixedVectorEnv(VectorEnv):
    """Envs of several sections; which env is of which, :class:`~rlinf.envs.config.Shares` says.

    Every stage has envs of every section, in places that are the same in all stages.

    Args:
        sections: By their keys in the recipe, with equal ``group_size`` and ``auto_reset``.
        num_envs: N, the envs of this vector env.
        first_env: Global number of its first env.
        stages: Pipeline stages.
        total_envs: Envs over all workers; by default N.
        settings: What else :class:`~rlinf.envs.supervised.vector.SupervisedVectorEnv` takes.

    Raises:
        ConfigError: A section cannot be built as configured, or what the sections show or take
            does not go together.
        MissingPackageError: A simulator is not installed.
        RunFailure: An env process failed to start.
    """

    def __init__(
        self,
        sections: Mapping[str, EnvConfig],
        *,
        num_envs: int,
        first_env: int = 0,
        stages: int = 1,
        total_envs: int | None = None,
        **settings: Any,
    ) -> None:
        configs = list(sections.values())
        shares = Shares.of(configs, configs[0].group_size)
        unit = stages * shares.unit
        if num_envs % unit or first_env % shares.unit or num_envs < 1:
            raise ConfigError(
                f"{num_envs} envs do not divide into {stages} stages with envs of every section; "
                f"nearest: {join_choices(nearest_multiples(unit, num_envs))}"
            )
        self.num_envs, self.first_env, self.stages = num_envs, first_env, stages
        self._names, self._parts = list(sections), list[SupervisedVectorEnv]()
        of_row = np.array([shares.section(row) for row in range(num_envs // stages)])
        self._rows = [np.flatnonzero(of_row == section) for section in range(len(configs))]
        with ExitStack() as started:
            for section, (key, config) in enumerate(sections.items()):
                first, count = (shares.count(section, n) for n in (first_env, num_envs))
                with in_section(key):
                    part = SupervisedVectorEnv(
                        config,
                        num_envs=count,
                        first_env=first,
                        numbers=[shares.number(section, first + n) for n in range(count)],
                        stages=stages,
                        total_envs=total_envs or num_envs,
                        section=key,
                        **settings,
                    )
                self._parts.append(started.enter_context(part))
            specs = [part.env_spec for part in self._parts]
            tasks = [_tasks(spec, c) for spec, c in zip(specs, configs, strict=True)]
            self._spec = joined(
                {
                    key: replace(spec, task_descriptions=own)
                    for key, spec, own in zip(sections, specs, tasks, strict=True)
                }
            )
            started.pop_all()
        self._first_task = [sum(map(len, tasks[:section])) for section in range(len(tasks))]
        self._limits = [_own_limits(spec, self._spec) for spec in specs]
        self._constant = self._constant_observations(specs)

    def _constant_observations(self, specs: Sequence[EnvSpec]) -> Observations:
        """What a stage [n, ...] shows before its envs write into it."""
        size, shapes = len(np.concatenate(self._rows)), self._spec.observation_shapes
        types = self._spec.observation_dtypes
        constant = {key: np.zeros((size, *shape), types[key]) for key, shape in shapes.items()}
        for rows, spec, first in zip(self._rows, specs, self._first_task, strict=True):
            constant[TASK_IDS][rows] = first
            if ACTION_MASK in constant:
                constant[ACTION_MASK][rows, : spec.action_dim] = True
        return constant

    @property
    def env_spec(self) -> EnvSpec:
        """See :attr:`VectorEnv.env_spec`."""
        return self._spec

    @property
    def process_ids(self) -> list[int]:
        """The ids of the env processes, section by section."""
        return [number for part in self._parts for number in part.process_ids]

    @property
    def task_resets(self) -> np.ndarray:
        """See :attr:`VectorEnv.task_resets`."""
        return np.concatenate([part.task_resets for part in self._parts])

    def reset(self, stage: int = 0) -> Observations:
        """See :meth:`VectorEnv.reset`."""
        shown = []
        for name, part in zip(self._names, self._parts, strict=True):
            with _named(name):
                shown.append(part.reset(stage))
        return self._padded(shown)

    def observations(self, stage: int = 0) -> Observations:
        """See :meth:`VectorEnv.observations`."""
        return self._padded([part.observations(stage) for part in self._parts])

    def send(self, actions: np.ndarray, stage: int = 0) -> None:
        """See :meth:`VectorEnv.send`; each section gets its own first dimensions, in its limits."""
        given = np.asarray(actions, np.float32)
        size, width = self.num_envs // self.stages, self._spec.action_dim
        if given.ndim != 3 or (given.shape[0], given.shape[2]) != (size, width):
            raise ValueError(
                f"actions of stage {stage} must be [{size}, C, {width}], are {given.shape}"
            )
        for part, rows, limits in zip(self._parts, self._rows, self._limits, strict=True):
            own = given[rows, :, : part.env_spec.action_dim]
            part.send(own if limits is None else np.clip(own, *limits), stage)

    def receive(self, stage: int = 0) -> VectorStep:
        """See :meth:`VectorEnv.receive`."""
        steps = []
        for name, part in zip(self._names, self._parts, strict=True):
            with _named(name):
                steps.append(part.receive(stage))
        final = self._scattered([step.final_mask for step in steps])
        return VectorStep(
            observations=self._padded([step.observations for step in steps]),
            final_observations=self._finals(steps, final) if final.any() else None,
            final_mask=final,
            faults=tuple(
                replace(fault, section=section)
                for section, step in enumerate(steps)
                for fault in step.faults
            ),
            episodes=tuple(self._episodes([step.episodes for step in steps])),
            **{name: self._scattered([getattr(step, name) for step in steps]) for name in _COLUMNS},
        )

    def exhausted(self, stage: int = 0) -> bool:
        """See :meth:`VectorEnv.exhausted`."""
        return all(part.exhausted(stage) for part in self._parts)

    def unfinished(self) -> list[EpisodeRecord]:
        """See :meth:`VectorEnv.unfinished`."""
        return self._episodes([part.unfinished() for part in self._parts])

    def assign_episodes(self, episode_seeds: Sequence[tuple[int, ...]]) -> None:
        """See :meth:`VectorEnv.assign_episodes`; the place in the list says of which section."""
        for part in self._parts:
            part.assign_episodes(episode_seeds)

    def render(self, env: int = 0) -> np.ndarray:
        """See :meth:`VectorEnv.render`; sections may have pictures of different sizes."""
        stage, row = divmod(env, self.num_envs // self.stages)
        section = next(n for n, rows in enumerate(self._rows) if row in rows)
        rows = self._rows[section]
        return self._parts[section].render(stage * len(rows) + int(np.searchsorted(rows, row)))

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        return {"sections": {str(n): part.state_dict() for n, part in enumerate(self._parts)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`VectorEnv.load_state_dict`."""
        saved = state.get("sections", {})
        if len(saved) != len(self._parts):
            raise CheckpointError(
                f"the checkpoint holds the envs of {len(saved) or 1} sections, this run has "
                f"{len(self._parts)}; resume with the same sections"
            )
        for number, part in enumerate(self._parts):
            part.load_state_dict(saved[str(number)])

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        for part in self._parts:
            part.close()

    def _padded(self, parts: Sequence[Observations]) -> Observations:
        """What each section shows [m, ...] as rows of a stage [n, ...]."""
        whole = {key: array.copy() for key, array in self._constant.items()}
        for part, rows, first in zip(parts, self._rows, self._first_task, strict=True):
            for key, array in part.items():
                if key == TASK_IDS:
                    whole[key][rows] = array + first
                elif present(key) in VECTORS:
                    whole[key][rows, : array.shape[1]] = array
                else:
                    whole[key][rows] = array
        return whole

    def _finals(self, steps: Sequence[VectorStep], mask: np.ndarray) -> Observations:
        """The last observations of the episodes of ``mask`` [n] that ended."""
        parts: list[Observations] = []
        for step in steps:
            shown = {key: np.zeros_like(array) for key, array in step.observations.items()}
            for key, array in (step.final_observations or {}).items():
                shown[key][step.final_mask] = array
            parts.append(shown)
        return {key: array[mask] for key, array in self._padded(parts).items()}

    def _episodes(self, parts: Sequence[Sequence[EpisodeRecord]]) -> list[EpisodeRecord]:
        """Those of each section by env, with their tasks among those of all."""
        found = [
            replace(episode, task=episode.task + first)
            for part, first in zip(parts, self._first_task, strict=True)
            for episode in part
        ]
        return sorted(found, key=lambda episode: episode.env)

    def _scattered(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Rows of each section [m, ...] in their places in a stage [n, ...]."""
        whole = np.empty((self.num_envs // self.stages, *parts[0].shape[1:]), parts[0].dtype)
        for rows, part in zip(self._rows, parts, strict=True):
            whole[rows] = part
        return whole


def divided(states: Sequence[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """Divide the envs of some workers among others, as
    :func:`~rlinf.envs.supervised.block.reshard` does, section by section."""
    if "sections" not in states[0]:
        return reshard(states, workers)
    parts = {
        name: reshard([state["sections"][name] for state in states], workers)
        for name in states[0]["sections"]
    }
    return [
        {"sections": {name: part[rank] for name, part in parts.items()}} for rank in range(workers)
    ]


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Let what ends the run say in which section it happened."""
    try:
        yield
    except RunFailure as failure:
        raise RunFailure(f"{section}: {failure}") from failure


def _own_limits(spec: EnvSpec, whole: EnvSpec) -> tuple[np.ndarray, np.ndarray] | None:
    """Limits [A] of a section's actions; None where they are those of all."""
    dim, own = spec.action_dim, (spec.action_low, spec.action_high)
    if own == (whole.action_low[:dim], whole.action_high[:dim]):
        return None
    return np.array(own[0], np.float32), np.array(own[1], np.float32)


def _tasks(spec: EnvSpec, config: EnvConfig) -> tuple[str, ...]:
    """The tasks of a section in words; where it has none, its type and options stand for one."""
    words = [config.type, *(text for text in config.options.values() if isinstance(text, str))]
    return spec.task_descriptions or (" ".join(words),)
