"""Evaluation of a policy on fixed episodes that training never sees, and tasks that have one."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from rlinf.checkpoint.weights_file import ENVIRONMENT, POLICY_FILE, refuse_unscaled
from rlinf.data.episode_evaluation import (
    EpisodeOutcome,
    EvaluationResult,
    EvaluationSpec,
    manner_of,
)
from rlinf.data.played_episodes import PlayedEpisodes
from rlinf.envs.config import EnvConfig, Shares
from rlinf.envs.observation_names import is_depth
from rlinf.envs.spec import (
    ENV_SPEC_FILE,
    EnvSpec,
    refuse_other_numbers,
    refuse_other_training,
    written_spec,
)
from rlinf.envs.supervised.mixture import vector_env
from rlinf.errors import CheckpointError, ConfigError, RunFailure
from rlinf.flow.graph import Flow, Stage
from rlinf.models.config import GaussianPolicyConfig, ModelConfig, SquashedConfig
from rlinf.monitor.video import framed, tile, write_video
from rlinf.runners.evaluation import Evaluator, good_checkpoint, load_run
from rlinf.runners.task import Purpose, Task
from rlinf.workers.config.acting import EvaluatedConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf.checkpoint.contents import Checkpoint
    from rlinf.models.policy import Policy
    from rlinf.runners.groups import Groups
    from rlinf.runners.run import Run
    from rlinf.workers.env import EvaluationReport

log = logging.getLogger(__name__)

EvaluatedT = TypeVar("EvaluatedT", bound=EvaluatedConfig)

_PURPOSE_NUMBERS = {"periodic": 0, "held_out": 1}
FRAMES_PER_SECOND = 30
"""Of videos whose simulator does not say its rate; others last as long as their episodes."""


class EpisodeEvaluator(Evaluator[EvaluationSpec, EvaluationResult]):
    """Plays episodes in the simulators of a recipe, by the mode of the policy or by its draws.

    The evaluations during training and the held-out ones at the end share no seed, and neither
    shares one with training: each is drawn from the evaluation seed and its purpose.
    """

    spec_class = EvaluationSpec
    films = True

    def __init__(self, config: EvaluatedConfig) -> None:
        self._config = config
        self.manner = manner_of(deterministic=config.evaluation.deterministic)
        self.suffix = "" if config.evaluation.deterministic else "_drawn"
        # By the mode an episode of an env is the same whenever it begins; draws are others.
        self.keeps_what_is_played = config.evaluation.deterministic

    def spec(self, purpose: Purpose, items: int | None = None) -> EvaluationSpec:
        """The episodes that a run is evaluated on."""
        config, evaluation = self._config, self._config.evaluation
        configured = evaluation.periodic_episodes if purpose == "periodic" else evaluation.episodes
        sequence = np.random.SeedSequence((evaluation.seed, _PURPOSE_NUMBERS[purpose]))
        # 31 bits, because some simulators keep seeds in a signed 32-bit integer.
        count = items or configured
        seeds = sequence.generate_state(count) >> 1
        if evaluation.walk:
            seeds = self._walked(count, behind=evaluation.episodes if purpose == "periodic" else 0)
        sections = list(config.evaluated.values())
        return EvaluationSpec(
            task=_played_in(sections),
            episodes=tuple((number, int(seed)) for number, seed in enumerate(seeds)),
            horizon=max(section.max_episode_steps for section in sections),
            chunk=config.model.num_action_chunks,
            success=evaluation.success,
        )

    def _walked(self, count: int, *, behind: int) -> np.ndarray:
        """[count] seeds 0, 1, 2, … within each section, or those that follow so many episodes."""
        shares, seeds = self._config.evaluation_shares, np.zeros(count, np.int64)
        for section in range(len(shares.sizes)):
            own = shares.count(section, count)
            places = [shares.number(section, place) for place in range(own)]
            seeds[places] = np.arange(own) + shares.count(section, behind)
        return seeds

    def check(self, spec: EvaluationSpec) -> None:
        """Refuse the specification of another task."""
        own = self.spec("held_out")
        for name in ("task", "horizon", "chunk"):
            wanted, given = getattr(spec, name), getattr(own, name)
            if wanted != given:
                raise ConfigError(
                    f"the evaluation specification is for {name} {wanted}, the run has {given}: "
                    "evaluate a run of that task, or write a specification for this one"
                )

    def play(
        self, groups: Groups, spec: EvaluationSpec, name: str, kept: PlayedEpisodes | None = None
    ) -> EvaluationResult:
        """Play a specification's episodes."""
        seeds = dict(spec.episodes)
        known = {} if kept is None else kept.read()
        if len(known) == len(spec.episodes):  # the simulator says what its tasks are
            known.pop(spec.episodes[-1][0])
        left = _left_to_play(spec.episodes, known, self._config.evaluation.num_envs)
        report = play_episodes(groups, left, kept=kept)
        # A faulty episode is tried again; its last record counts.
        records = known | {record.episode_id: record for record in report.episodes}
        outcomes = [
            EpisodeOutcome(
                episode_id=record.episode_id,
                seed=seeds[record.episode_id],
                success_once=record.success_once,
                success_at_end=record.success_at_end,
                episode_return=record.episode_return,
                episode_len=record.episode_len,
                valid=record.valid,
                task=record.task,
                seed_shift=record.seed_shift,
            )
            for record in records.values()
        ]
        for reason, (env, told) in report.first_faults.items():
            where = f"env {env}" if env >= 0 else "no env was at work"
            log.warning("A simulator failed (%s) in an evaluation: %s: %s", reason, where, told)
        return EvaluationResult.of(
            spec,
            outcomes,
            name,
            report.tasks,
            report.chain_length,
            task_chains=report.task_chains,
            deterministic=self._config.evaluation.deterministic,
        )

    def metrics(self, result: EvaluationResult) -> dict[str, float]:
        """Success rate with its interval, and return; of several tasks, the rate of each, and of
        chains of tasks that of each length."""
        low, high = result.interval
        by_task = result.by_task if len(result.tasks) > 1 else {}
        return {
            **{
                f"eval/success/{task}": won / played
                for task, (won, played) in by_task.items()
                if played
            },
            **{f"eval/reached/{length}": share for length, share in result.reached_shares.items()},
            "eval/success": result.success_rate,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/return": result.mean_return,
            "eval/return_std": result.return_deviation,
        }

    def score(self, result: EvaluationResult, metrics: Mapping[str, float]) -> float:
        """The success rate, or below it where no episode succeeds, by the mean return."""
        del metrics
        return result.score

    def load_weights(
        self, groups: Groups, workers: Mapping[str, Any], step: int, checkpoint: Path | None = None
    ) -> None:
        """Let the policy act with what the state of a run's workers has; see
        :func:`acting_weights`."""
        weights, base = acting_weights(workers, self._config.model, checkpoint)
        groups["rollout"].load_weights(weights, step, base).wait()

    def leave_policy(self, run: Run) -> None:
        """Leave weights behind, evaluate held-out episodes, and leave a video."""
        path = run.directory.path / POLICY_FILE  # first: an evaluation that fails loses nothing
        workers = run.groups.state(whole=True)
        weights, base = acting_weights(workers, self._config.model)
        export_policy(path, self._config, weights, base, run.directory.path)
        run.evaluate("held_out")
        print(f"held-out episodes: {run.last_evaluation}", flush=True)
        if run.interrupted:  # what was learnt is written; a resumed run films it
            return
        path = run.directory.videos / "trained_policy.mp4"
        video = self.film(run.groups, self.spec("held_out"), path)
        if video is not None:
            print(f"video of the trained policy: {video}", flush=True)

    def film(
        self, groups: Groups, spec: EvaluationSpec, path: Path, *, at_least: int = 0
    ) -> Path | None:
        """Write the first episodes side by side; None, with a warning, if nothing renders."""
        evaluation = self._config.evaluation
        shown = spec.episodes[: evaluation.num_envs]  # an episode for each environment
        count = min(max(evaluation.video_episodes, at_least), len(shown))
        if count == 0:
            return None
        try:
            played = play_episodes(groups, shown, frames=count)
        except RunFailure as failure:
            # Its process adds a stack, or says before it where it failed, and the class.
            reason = str(failure).rstrip().splitlines()[-1].rpartition("RuntimeError: ")[2]
            if "draws no pictures" not in reason:
                reason += "; `rlinf doctor` says what rendering needs"
            log.warning("no video: %s.", reason)
            log.debug("why there is no video: %s", failure)
            return None
        rate = played.frame_rate or FRAMES_PER_SECOND
        return write_video(path, tile(framed(played.frames)), rate)


def _played_in(sections: Sequence[EnvConfig]) -> dict[str, Any]:
    """The simulator of a specification; of several, each with its share in the episodes, which
    follow each other in a pattern (:class:`~rlinf.envs.config.Shares`)."""
    tasks = [
        {
            "type": env.type,
            "options": dict(env.options),
            "ignore_terminations": env.ignore_terminations,
        }
        for env in sections
    ]
    if len(sections) == 1:
        return tasks[0]
    sizes = Shares.of(sections).sizes
    return {
        "sections": [
            {**task, "horizon": env.max_episode_steps, "share": size}
            for task, env, size in zip(tasks, sections, sizes, strict=True)
        ]
    }


def acting_weights(
    workers: Mapping[str, Any], model: ModelConfig, checkpoint: Path | None = None
) -> tuple[dict[str, Any], str | None]:
    """Weights of the policy in the state of a run's workers, and what it was trained from.

    The ranks of the trainer may have written their parts into a ``checkpoint``. A ConfigError where
    they are of a version in which the ``model`` read states otherwise.
    """
    from rlinf.models.policy_weights import BASE
    from rlinf.trainers.modules import POLICY
    from rlinf.trainers.trainer import read_sharded, saved_weights

    state = workers["actor"]["trainer"]
    if state is None and checkpoint is not None:
        state = read_sharded(checkpoint / "actor")
    refuse_unscaled(model.state_scaling, state, source="the checkpoint", key="model.proprioception")
    return saved_weights(state, POLICY), state.get(BASE)


def export_policy(
    path: Path, config: EvaluatedConfig, weights: Mapping[str, Tensor], base: str | None, run: Path
) -> None:
    """Write the weights of the policy of a run, trained from a ``base``, to a file that later runs
    take."""
    from rlinf.checkpoint.weights import export_weights
    from rlinf.models.policy_weights import BASE

    said, spec = config.model.header(), written_spec(run)
    if base is not None:
        said[BASE] = base
    if spec is not None:
        said[ENVIRONMENT] = json.dumps(spec.of_numbers().to_json())
    export_weights(path, weights, said)


def _left_to_play(
    episodes: Sequence[tuple[int, int]], known: Container[int], envs: int
) -> list[tuple[int, ...]]:
    """The list of episodes without those that are known, each of which still is for the same one of
    so many environments: where it stands in a batch decides the last bits of its actions."""
    own = [[each for each in episodes[env::envs] if each[0] not in known] for env in range(envs)]
    return [each or () for row in zip_longest(*own) for each in row]


def play_episodes(
    groups: Groups,
    episodes: Sequence[tuple[int, ...]],
    *,
    frames: int = 0,
    kept: PlayedEpisodes | None = None,
) -> EvaluationReport:
    """Play the given (episode id, seed) pairs; an env that comes to an empty one rests.

    The first ``frames`` environments of all are filmed; what has ended is ``kept`` where that is
    said.
    """
    report = groups.evaluate(
        {
            "env": {"episodes": list(episodes), "frames": frames, "kept": kept},
            "rollout": {"step": 0, "evaluation": True},
        }
    )
    first, *others = report.results("env")
    whole: EvaluationReport = first
    for part in others:
        whole.episodes.extend(part.episodes)
        whole.frames.extend(part.frames)
        whole.first_faults = part.first_faults | whole.first_faults
    whole.episodes.sort(key=lambda record: record.episode_id)
    return whole


# -- tasks that are evaluated so ------------------------------------------------------------------


class PlayingTask(Task[EvaluatedT]):
    """What tasks share whose policy plays episodes to be evaluated."""

    starts_with: ClassVar = {
        "source": ("env", "actor"), "rollout": ("env",), "replay": ("env",), "actor": ("env",)
    }  # fmt: skip
    evaluates = ("env", "rollout")
    changeable_evaluation = ("cluster", "weight_sync", "env", "evaluation")

    def __init__(self, config: EvaluatedT, directory: Path) -> None:
        super().__init__(config, directory)
        self.evaluator: EpisodeEvaluator = EpisodeEvaluator(config)

    @classmethod
    def evaluation(cls, flow: Flow, config: EvaluatedT) -> None:
        """Environments and policy answer each other until every episode has ended."""
        flow.loop(
            "evaluation",
            Stage("env", "evaluate", inputs=("actions",), outputs=("observations",)),
            Stage("rollout", "generate", inputs=("observations",), outputs=("actions",)),
        )

    evaluation_start = property(lambda self: self.config.evaluation.start)

    def launched(self, groups: Groups) -> None:
        """Write down what the policy sees and does; of a run that is resumed it is as before."""
        spec: EnvSpec = groups.started["env"][0]
        if (trained := written_spec(self.directory)) is not None:
            refuse_other_numbers(trained, spec, key="env.train")
        (self.directory / ENV_SPEC_FILE).write_text(json.dumps(spec.to_json()), encoding="utf-8")
        self._warn_of_far_actions(spec)
        self._warn_of_unread_pictures(spec)

    def begin(self, run: Run) -> None:
        """Say where no evaluation during training falls due, nor what depends on one."""
        super().begin(run)
        interval, start = self.config.evaluation.interval, self.config.evaluation.start
        due = min(interval, self.steps)
        last = self.steps // due * due if due else start
        if due < interval or last < start:
            log.warning(
                "evaluation.interval = %d and evaluation.start = %d: none of the %d steps of the "
                "run is evaluated; nearest: %d and %d",
                interval, start, self.steps, due, min(start, last),
            )  # fmt: skip

    def _warn_of_unread_pictures(self, spec: EnvSpec) -> None:
        """A policy on states alone learns nothing from what the environment may show in no other
        way; and depth is shown where somebody asked for it."""
        model, shown = self.config.model, spec.seen_by_cameras
        near = model.with_pictures
        if near is None:
            depths = tuple(filter(is_depth, shown))
            shown = depths if set(depths) <= set(model.unread(shown)) else ()
            near = f"model.{model.reads_depth_by}" if model.reads_depth_by else "cnn"
        if shown:
            hint = f"; nearest: {near}" if near else ""
            log.warning("%s: not read by %s%s", ", ".join(shown), model.type, hint)

    def _warn_of_far_actions(self, spec: EnvSpec) -> None:
        """A Gaussian begins at 0, in the units of the environment: of a box that is elsewhere, or
        of another size, it sees little or nothing."""
        model = self.config.model
        if not isinstance(model, GaussianPolicyConfig) or isinstance(model, SquashedConfig):
            return
        deviation = math.exp(model.initial_log_std)
        for number, (low, high) in enumerate(zip(spec.action_low, spec.action_high, strict=True)):
            beside = low > 2 * deviation or high < -2 * deviation
            if math.isfinite(high - low) and (
                beside or not 0.2 * deviation <= high - low <= 20 * deviation
            ):
                log.warning(
                    "Action %d goes from %g to %g, and the policy begins with 0 ± %.2g: let "
                    "actions go from -1 to 1 (gymnasium.wrappers.RescaleAction).",
                    number, low, high, deviation,
                )  # fmt: skip
                return

    def load_weights(self, groups: Groups, checkpoint: Checkpoint) -> None:
        """The policy acts without an actor."""
        with _refusing_other_training(self.directory, groups.started["env"][0]):
            workers = checkpoint.tree["workers"]
            self.evaluator.load_weights(groups, workers, checkpoint.step, checkpoint.path)


@contextmanager
def _refusing_other_training(run: Path, played: EnvSpec) -> Iterator[None]:
    """Refuse environments whose numbers mean something else than in those of a run, and say of
    weights that do not fit how the environments differ."""
    trained = written_spec(run)
    try:
        yield
    except CheckpointError:
        if trained is not None:
            refuse_other_training(trained, played, key="env.train")
        raise
    if trained is not None:
        refuse_other_numbers(trained, played, key="env.train")


# -- the policy that a recipe begins with, or that a run has trained ------------------------------


class InitialPolicy:
    """The policy that a recipe begins with.

    Args:
        config: Of the recipe.
        name: What it is called.
        source: What others are told of where it comes from, which need not know its path.
    """

    step = 0

    def __init__(self, config: EvaluatedConfig, name: str, source: str) -> None:
        self.config, self.name, self.source_name = config, name, source

    def build(self, spec: EnvSpec) -> Policy:
        """The policy for envs of this spec, with its weights, on the CPU."""
        return self.config.build_policy(spec).eval()

    def env_spec(self) -> EnvSpec:
        """What its simulator shows and takes."""
        count = self.config.evaluation_shares.unit
        chunk = self.config.model.num_action_chunks
        with vector_env(
            self.config.evaluated, num_envs=count, seed=0, purpose="eval", max_chunk=chunk
        ) as env:
            return env.env_spec

    def newer(self, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        """Step and weights of a policy that took the place of ``step``'s; None: there is none."""
        del step
        return None


class TrainedPolicy(InitialPolicy):
    """The policy that a run has trained, or has trained so far.

    Args:
        task: Of the run.
        source: A run directory, whose newest or best checkpoint counts; or one of its checkpoints.
        overrides: ``key=value`` for its configuration; none decides what was trained.

    Raises:
        CheckpointError: There is no good checkpoint.
    """

    def __init__(self, task: type[Task[Any]], source: Path, overrides: Sequence[str] = ()) -> None:
        self._task, self._source = task, source
        config, checkpoint = load_run(task, source, overrides)
        assert isinstance(config, EvaluatedConfig)
        self._run, self.step = checkpoint.path.parent.parent, checkpoint.step
        super().__init__(config, f"{self._run.name} step {checkpoint.step}", self._run.name)
        workers = checkpoint.tree["workers"]
        with checkpoint.read_as_written():
            self._weights, self._base = acting_weights(workers, config.model, checkpoint.path)
        self._looked_at: frozenset[tuple[str, int, int]] | None = None
        self._refusal = ""

    def build(self, spec: EnvSpec) -> Policy:
        """The policy for envs of this spec, with its weights, on the CPU."""
        return self._loaded(super().build(spec), spec)

    def as_kept(self) -> Policy:
        """The policy as checkpoints hold it, to be written elsewhere: in float32, where it may act
        in a format that rounds its weights."""
        spec = self.env_spec()
        return self._loaded(self.config.build_policy(spec, as_kept=True).eval(), spec)

    def _loaded(self, policy: Policy, spec: EnvSpec) -> Policy:
        from rlinf.models.policy_weights import load_travelling

        with _refusing_other_training(self._run, spec):
            load_travelling(policy, self._weights, base=self._base)
        return policy

    def write(self, path: Path, *, whole: bool = False) -> None:
        """Write its weights as a run leaves them behind; or the ``whole`` policy, adapters in their
        matrices, which needs no base."""
        if not whole:
            export_policy(path, self.config, self._weights, self._base, self._run)
            return
        from rlinf.models.policy_weights import merged_adapters

        state = self.as_kept().state_dict()
        export_policy(path, self.config, merged_adapters(state, state), None, self._run)

    def env_spec(self) -> EnvSpec:
        """What it was trained on: as the run wrote it down, or else as its simulator says."""
        return written_spec(self._run) or super().env_spec()

    def newer(self, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        """Step and weights of the checkpoint that counts now, None where it is that of ``step``.

        Raises:
            CheckpointError: No checkpoint can be used any more.
        """
        files = _files_of(self._run / "checkpoints")
        if files == self._looked_at:  # all of a checkpoint is read, and what is damaged named
            if self._refusal:
                raise CheckpointError(self._refusal)
            return None
        self._looked_at, self._refusal = files, ""
        try:
            checkpoint = good_checkpoint(self._task, self._source)
        except CheckpointError as error:
            self._refusal = str(error)
            raise
        if checkpoint.step == step:
            return None
        with checkpoint.read_as_written():
            workers = checkpoint.tree["workers"]
            weights, _ = acting_weights(workers, self.config.model, checkpoint.path)
        return checkpoint.step, weights


def _files_of(directory: Path) -> frozenset[tuple[str, int, int]]:
    """Files of the checkpoints with their times and sizes, without what is being written."""
    found = set()
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (os.path.join(folder, name) for name in names):
            with suppress(OSError):  # it may be removed meanwhile
                state = os.lstat(path)
                found.add((path, state.st_mtime_ns, state.st_size))
    return frozenset(found)
