"""Env worker: the simulators' side of an embodied rollout."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues, TrajectoryBuilder
from rlinf.data.played_episodes import PlayedEpisodes, PlayedEpisodesWriter
from rlinf.envs.config import EnvConfig
from rlinf.envs.results import EpisodeRecord, Observations, VectorStep
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.mixture import divided, vector_env
from rlinf.envs.vector import VectorEnv
from rlinf.errors import RunFailure
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.workers.config.acting import ActingConfig
from rlinf.workers.context import WorkerContext

log = logging.getLogger(__name__)

_BEGINS_AFRESH = "begins_afresh"


@dataclass
class RolloutReport:
    """What happened in the environments during one rollout of one worker."""

    episodes: list[EpisodeRecord] = field(default_factory=list)
    ended: int = -1
    """Sound episodes that came to their end, also those that :meth:`close` leaves out; -1, as in
    what runs that were begun earlier kept: all of ``episodes``."""
    faults: Counter[str] = field(default_factory=Counter)
    section_faults: Counter[str] = field(default_factory=Counter)
    """By reason and section, where there are several."""
    first_faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By reason, the env of the first one (-1: none was at work) and what was said of it."""
    env_steps: int = 0
    extra_rows: int = 0
    simulator_seconds: float = 0.0
    tasks: tuple[str, ...] = ()
    chain_length: int = 0
    """See :attr:`EnvSpec.chain_length`."""
    task_chains: tuple[int, ...] = ()
    """See :attr:`EnvSpec.task_chains`."""
    task_resets: np.ndarray | None = None
    """Totals of the run, see :attr:`VectorEnv.task_resets`."""

    def __post_init__(self) -> None:
        # Steps under way in checkpoints of runs that were begun earlier have neither.
        if self.ended < 0:
            self.ended = sum(episode.valid for episode in self.episodes)
        self.first_faults = {
            reason: _env_and_words(told) if isinstance(told, str) else told
            for reason, told in self.first_faults.items()
        }

    def add(self, step: VectorStep) -> None:
        """Count one exchange."""
        self.episodes.extend(step.episodes)
        self.ended += sum(episode.valid for episode in step.episodes)
        self.faults.update(fault.reason.value for fault in step.faults)
        for fault in step.faults:
            self.first_faults.setdefault(fault.reason.value, (fault.env, fault.summary))
        named = [fault for fault in step.faults if fault.section is not None]
        self.section_faults.update(f"{fault.reason.value}/{fault.section}" for fault in named)
        self.env_steps += step.rewards.size

    def close(self, cut: Sequence[EpisodeRecord], first: int) -> None:
        """Count the first sound episodes of each env alone, as many as the rollout surely holds, be
        they ``cut`` by the reset that follows: of later ones, and of those that end by themselves,
        too many would be short, which mostly are successes."""
        of_env: Counter[int] = Counter()
        counted = []
        for episode in (*self.episodes, *cut):
            of_env[episode.env] += episode.valid
            if not episode.valid or of_env[episode.env] <= first:
                counted.append(episode)
        self.episodes = counted


def _env_and_words(told: str) -> tuple[int, str]:
    """Of ``env NUMBER: WORDS``, as faults were kept earlier."""
    env, _, words = told.removeprefix("env ").partition(": ")
    return int(env), words


@dataclass
class EvaluationReport(RolloutReport):
    """What happened in an evaluation; pictures [H, W, 3] by environment and chunk step."""

    frames: list[list[np.ndarray]] = field(default_factory=list)
    frame_rate: float | None = None
    """Pictures per second of an episode; None where the simulator does not say its rate."""


class EnvWorker(StageWorker):
    """Steps a share of the run's environments; sub-batches overlap with the policy."""

    records = (RolloutReport, EpisodeRecord)
    divides_state = True

    def __init__(self, config: ActingConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._stages = config.rollout.pipeline_stage_num
        self._vectors: dict[str, VectorEnv] = {}
        self._unread: tuple[str, ...] = ()
        self._set_aside: dict[str, Any] | None = None
        """State of training environments that made room for an evaluation."""
        self._was_reset = False

    def start(self) -> EnvSpec:
        """Start the training environments, or else those for evaluation."""
        if not self._context.trains:
            return self._evaluation_env([(0, 0)]).env_spec
        return self._training_env().env_spec

    def _training_env(self) -> VectorEnv:
        """The training environments; built anew where they made room for an evaluation."""
        if "train" not in self._vectors:
            if "eval" in self._vectors:
                self._vectors.pop("eval").close()
            env = self._config.env
            self._vectors["train"] = self._build(env.sections, env.num_envs, "train")
            if self._set_aside is not None:
                self._vectors["train"].load_state_dict(self._set_aside)
                self._set_aside = None
        return self._vectors["train"]

    def _make_room(self) -> None:
        """Close the training environments beside which no other may be open."""
        alone = any(each.one_at_a_time for each in self._config.env.sections.values())
        if alone and "train" in self._vectors:
            env = self._vectors.pop("train")
            self._set_aside = env.state_dict()
            env.close()

    def _build(
        self,
        sections: Mapping[str, EnvConfig],
        total: int,
        purpose: str,
        episodes: Sequence[tuple[int, ...]] | None = None,
    ) -> VectorEnv:
        count = total // self._world_size
        made = vector_env(
            sections,
            num_envs=count,
            first_env=self._rank * count,
            total_envs=total,
            seed=self._config.seed,
            stages=self._stages,
            purpose=purpose,
            episode_seeds=episodes,
            max_chunk=self._config.model.num_action_chunks,
        )
        self._unread = self._config.model.unread(made.env_spec.seen_by_cameras)
        return made

    def _read(self, observations: Observations) -> Observations:
        """Observations without the pictures that the policy does not read: they would be handed
        over, kept in rollouts and replays, and written into checkpoints for nobody."""
        return {key: each for key, each in observations.items() if key not in self._unread}

    # -- stages ---------------------------------------------------------------------------------

    def interact(self, actions: InputStream) -> Generator[Emit, None, RolloutReport]:
        """Stage: one rollout of every sub-batch; returns a :class:`RolloutReport`.

        Yields observations to the policy and, at the end, the arrays of one trajectory per
        sub-batch.
        """
        env, steps = self._training_env(), self._config.chunk_steps
        spec = env.env_spec
        report = RolloutReport(
            tasks=spec.task_names, chain_length=spec.chain_length, task_chains=spec.task_chains
        )
        builders = [
            TrajectoryBuilder(
                self._env_ids(env, stage),
                steps,
                keep_next_observations=self._config.keeps_next_observations,
            )
            for stage in range(self._stages)
        ]
        sent: list[ObservationBatch] = []
        for stage in range(self._stages):
            fresh = not self._was_reset or self._config.begins_afresh
            observations = env.reset(stage) if fresh else env.observations(stage)
            sent.append(self._batch(env, stage, self._read(observations)))
            yield self._emit("observations", stage, sent[stage])
        self._was_reset = True
        for stage, answer, step in self._exchanges(env, actions, report):
            builder = builders[stage]
            if isinstance(answer, RolloutValues):
                yield self._emit("trajectories", stage, builder.build(answer))
                continue
            if step is None:
                raise RuntimeError(f"sub-batch {stage} was answered but not stepped")
            builder.add(sent[stage], answer, step)
            report.add(step)
            if builder.exhausted and not builder.complete:
                raise RunFailure(
                    f"{dict(report.faults)} faults left too few valid transitions: "
                    f"{builder.time} chunk steps did not fill a rollout of {steps}"
                )
            sent[stage] = self._batch(
                env, stage, step.observations, builder.time, step, act=not builder.complete
            )
            yield self._emit("observations", stage, sent[stage])
        if self._config.begins_afresh:
            longest = max(self._config.episode_chunk_steps)
            report.close(env.unfinished(), first=max(1, steps // longest))
        report.task_resets = env.task_resets
        report.extra_rows = sum(builder.time - steps for builder in builders)
        return report

    def evaluate(
        self,
        actions: InputStream,
        *,
        episodes: Sequence[tuple[int, ...]],
        frames: int = 0,
        kept: PlayedEpisodes | None = None,
    ) -> Generator[Emit, None, EvaluationReport]:
        """Stage: play given episodes to their end; returns an :class:`EvaluationReport`.

        Args:
            actions: Stream of :class:`PolicyBatch`.
            episodes: (episode id, reset seed) of the whole evaluation, over all its environments;
                one that comes to an empty entry rests.
            frames: Environments of the whole evaluation to take pictures of, from the first on.
            kept: Where episodes are written down as they end; None: nowhere.
        """
        with nullcontext() if kept is None else kept.writer(self._rank) as writer:
            return (yield from self._evaluated(actions, episodes, frames, writer))

    def _evaluated(
        self,
        actions: InputStream,
        episodes: Sequence[tuple[int, ...]],
        frames: int,
        writer: PlayedEpisodesWriter | None,
    ) -> Generator[Emit, None, EvaluationReport]:
        env = self._evaluation_env(episodes)
        filmed = range(max(0, min(env.num_envs, frames - env.first_env)))
        spec, rate = env.env_spec, env.env_spec.control_rate
        report = EvaluationReport(
            frames=[[] for _ in filmed],
            frame_rate=None if rate is None else rate / self._config.model.num_action_chunks,
            tasks=spec.task_names,
            chain_length=spec.chain_length,
            task_chains=spec.task_chains,
        )
        times = [0] * self._stages
        for stage in range(self._stages):
            observations = env.reset(stage)
            batch = self._batch(env, stage, self._read(observations))
            yield self._emit("observations", stage, batch)
        # A picture can be taken only while no simulator is at work.
        for stage, _, step in self._exchanges(env, actions, report, ahead=not frames):
            if step is None:
                continue
            times[stage] += 1
            report.add(step)
            if writer is not None:
                writer.add(step.episodes)
            batch = self._batch(
                env,
                stage,
                step.observations,
                time=times[stage],
                act=not env.exhausted(stage),
            )
            size = env.num_envs // self._stages
            for number in filmed:
                if number // size == stage:
                    report.frames[number].append(env.render(number))
            yield self._emit("observations", stage, batch)
        return report

    def _exchanges(
        self,
        env: VectorEnv,
        actions: InputStream,
        report: RolloutReport,
        *,
        ahead: bool = True,
    ) -> Iterator[tuple[int, PolicyBatch | RolloutValues, VectorStep | None]]:
        """Step sub-batches as their actions arrive, until the policy has given its values.

        With ``ahead``, actions that are there are handed to the simulators before waiting for any
        result, so that the simulators have work while the policy thinks.
        """
        in_flight: deque[tuple[int, PolicyBatch]] = deque()
        unfinished = self._stages
        while unfinished:
            if not in_flight or (ahead and actions.ready()):
                item = next(actions)
                stage = item.source % self._stages
                answer: PolicyBatch | RolloutValues = item.payload
                if isinstance(answer, RolloutValues):
                    unfinished -= 1
                    yield stage, answer, None
                else:
                    env.send(answer.actions, stage)
                    in_flight.append((stage, answer))
                continue
            stage, answer = in_flight.popleft()
            begin = time.perf_counter()
            step = env.receive(stage)
            report.simulator_seconds += time.perf_counter() - begin
            seen, final = self._read(step.observations), step.final_observations
            final = None if final is None else self._read(final)
            yield stage, answer, replace(step, observations=seen, final_observations=final)

    def _evaluation_env(self, episodes: Sequence[tuple[int, ...]]) -> VectorEnv:
        """The evaluation environments, about to walk a list of episodes."""
        self._make_room()
        if "eval" in self._vectors:
            self._vectors["eval"].assign_episodes(episodes)
        else:
            total = self._config.evaluation.num_envs
            self._vectors["eval"] = self._build(self._config.evaluated, total, "eval", episodes)
        return self._vectors["eval"]

    def _env_ids(self, env: VectorEnv, stage: int) -> np.ndarray:
        """[n] int64 global numbers of a sub-batch's environments."""
        size = env.num_envs // env.stages
        first = env.first_env + stage * size
        return np.arange(first, first + size, dtype=np.int64)

    def _batch(
        self,
        env: VectorEnv,
        stage: int,
        observations: dict[str, np.ndarray],
        time: int = 0,
        step: VectorStep | None = None,
        *,
        act: bool = True,
    ) -> ObservationBatch:
        ids = self._env_ids(env, stage)
        return ObservationBatch(
            observations=observations,
            env_ids=ids,
            time=time,
            final_observations=None if step is None else step.final_observations,
            final_mask=np.zeros(len(ids), dtype=bool) if step is None else step.final_mask,
            act=act,
        )

    def _emit(self, edge: str, stage: int, payload: Any) -> Emit:
        return Emit(edge, self._rank * self._stages + stage, payload)

    # -- state ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Simulator states, episode counters and the observations that wait for an answer."""
        if not self._context.trains:
            return {}
        envs = self._set_aside or self._vectors["train"].state_dict()
        afresh = self._config.begins_afresh
        return {"envs": envs, "was_reset": self._was_reset, _BEGINS_AFRESH: afresh}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from the :meth:`state` of every rank, which may have been another number."""
        if not self._context.trains:
            return
        envs = divided([state["envs"] for state in states], self._world_size)
        if "train" in self._vectors:
            self._vectors["train"].load_state_dict(envs[self._rank])
        else:
            self._set_aside = envs[self._rank]
        self._was_reset = states[0]["was_reset"]
        # An earlier version did not say it: environments that reset themselves were left alone.
        before = states[0].get(_BEGINS_AFRESH, not self._config.auto_reset)
        if self._was_reset and self._config.begins_afresh and not before and self._rank == 0:
            log.warning(
                "the run was begun by a version in which episodes went on from one rollout to the "
                "next; now every rollout begins with a reset, as `%s` compares whole episodes: it "
                "goes on, and not as that version would have gone on",
                self._config.algorithm.type,
            )

    def close(self) -> None:
        """End the env processes."""
        for env in self._vectors.values():
            env.close()
