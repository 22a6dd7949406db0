"""Episodes recorded while somebody acts: a policy, or an expert that the simulator brings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rlinf.data.demonstrations import Demonstration
from rlinf.envs.base import REGISTRY, Observation
from rlinf.envs.config import EnvConfig
from rlinf.envs.observation_names import without_earlier
from rlinf.envs.results import EpisodeRecord, Observations, VectorStep
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError, RunFailure

log = logging.getLogger(__name__)

Act = Callable[[Observations], np.ndarray]
"""Observations by key [n, ...] to action chunks [n, C, A]."""
Actor = Callable[[EnvSpec], Act]
"""Who acts in an env of this spec."""


def expert_of(config: EnvConfig) -> Actor:
    """The expert that the simulator of an env section brings, on batches, one action at a time.

    Raises:
        ConfigError: It brings none for this task.
        MissingPackageError: The simulator is not installed.
    """
    act = REGISTRY.load(config.type).expert(config.adapter_options)
    if act is None:
        raise ConfigError(
            f"the env type `{config.type}` has no expert for these options; record the episodes "
            "of a trained policy instead, with: rlinf record RUN",
            key="type",
        )
    one: Callable[[Observation], np.ndarray] = act

    def act_on_batch(observations: Observations) -> np.ndarray:
        count = len(next(iter(observations.values())))
        actions = [one({key: array[row] for key, array in observations.items()})
                   for row in range(count)]  # fmt: skip
        return np.asarray(actions, np.float32)[:, None]

    return lambda spec: act_on_batch


_Step = tuple[Mapping[str, np.ndarray], np.ndarray, float]
"""Observation by key, action [A], reward."""


def _whole(episode: Sequence[_Step], record: EpisodeRecord) -> Demonstration:
    seen, actions, rewards = zip(*episode, strict=True)
    return Demonstration(
        observations={key: np.stack([each[key] for each in seen]) for key in seen[0]},
        actions=np.stack(actions),
        rewards=np.asarray(rewards, np.float32),
        seed=record.seed,
        success=record.success_once,
    )


def _ended(
    running: list[list[_Step]],
    observations: Observations,
    actions: np.ndarray,
    step: VectorStep,
) -> Iterator[tuple[int, Demonstration]]:
    """Add a step to the running episodes; those that it ended soundly, with their ids."""
    for row, episode in enumerate(running):
        if step.active[row]:
            # Sets hold each observation once: those before it are the rows before.
            seen = {key: array[row] for key, array in without_earlier(observations).items()}
            episode.append((seen, actions[row], float(step.rewards[row, 0])))
    for spoilt in np.flatnonzero(~step.valid):
        running[spoilt].clear()
    for record in step.episodes:
        if record.valid:
            yield record.episode_id, _whole(running[record.env], record)
        running[record.env].clear()


class BrokenRecording(RunFailure):
    """A failure, its ``__cause__``, in the middle of a recording; with the spec of the env and the
    ``episodes`` that had ended before it, one at least."""

    def __init__(self, cause: Exception, spec: EnvSpec, episodes: list[Demonstration]) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.__cause__, self.spec, self.episodes = cause, spec, episodes


def record_episodes(
    config: EnvConfig,
    actor: Actor,
    episodes: Sequence[tuple[int, int]],
    *,
    num_envs: int,
    seed: int = 0,
    noise: float = 0.0,
    stop: threading.Event | None = None,
) -> tuple[EnvSpec, list[Demonstration]]:
    """Play episodes and keep every primitive step; a faulty episode is left out.

    Args:
        config: The env to play in.
        actor: Who acts. Of a chunk of actions all are executed before it is asked again.
        episodes: (episode id, seed of the reset) of each.
        num_envs: Envs at the same time, at most one per episode.
        seed: Of the noise.
        noise: Standard deviation of normal noise on the executed actions. What is recorded is the
            action without it, so that one learns to come back from where it led (DART: Laskey et
            al. 2017).
        stop: Once it is set, episodes that have not ended are left out.

    Returns:
        What the env shows and takes, and the episodes in the order of the list.

    Raises:
        BrokenRecording: A failure ended it after some of them; before, it is raised itself.
    """
    kept: dict[int, Demonstration] = {}
    played = config.model_copy(update={"auto_reset": True, "group_size": 1})
    count = min(num_envs, len(episodes))
    with SupervisedVectorEnv(
        played, num_envs=count, seed=seed, purpose="eval", episode_seeds=episodes, max_chunk=1
    ) as env:
        spec = env.env_spec.of_present()
        try:
            _play(env, actor(env.env_spec), kept, random=np.random.default_rng(seed), noise=noise,
                  stop=stop)  # fmt: skip
        except Exception as error:
            if not kept:
                raise
            raise BrokenRecording(error, spec, _in_order(kept, episodes)) from error
    return spec, _in_order(kept, episodes)


def _in_order(
    kept: Mapping[int, Demonstration], episodes: Sequence[tuple[int, int]]
) -> list[Demonstration]:
    return [kept[number] for number, _ in episodes if number in kept]


def _play(
    env: SupervisedVectorEnv,
    act: Act,
    kept: dict[int, Demonstration],
    *,
    random: np.random.Generator,
    noise: float,
    stop: threading.Event | None,
) -> None:
    """Play what the env lists, and put each episode that ended soundly into ``kept``, by its id."""
    count = env.num_envs
    running: list[list[_Step]] = [[] for _ in range(count)]
    low, high = (np.asarray(bound, np.float32) for bound in
                 (env.env_spec.action_low, env.env_spec.action_high))  # fmt: skip
    observations = env.reset()
    waiting: list[list[np.ndarray]] = [[] for _ in range(count)]  # actions of each env
    while not env.exhausted() and not (stop is not None and stop.is_set()):
        if asking := [row for row, left in enumerate(waiting) if not left]:
            chunks = act({key: shown[asking] for key, shown in observations.items()})
            for number, chunk in zip(asking, chunks, strict=True):
                waiting[number] = list(chunk)
        actions = np.clip([left.pop(0) for left in waiting], low, high)
        executed = actions
        if noise:
            drawn = random.normal(0.0, noise, actions.shape).astype(np.float32)
            executed = np.clip(actions + drawn, low, high)
        step = env.chunk_step(executed[:, None])
        kept.update(_ended(running, observations, actions, step))
        left_out = {record.episode_id for record in step.episodes if not record.valid}
        for fault in step.faults:
            done = "left out" if fault.episode_id in left_out else "played again"
            log.warning("an episode is %s (%s): %s", done, fault.reason.value, fault.summary)
        for number in np.flatnonzero(step.final_mask | ~step.valid).tolist():
            waiting[number] = []  # the rest was meant for what is over
        observations = step.observations
