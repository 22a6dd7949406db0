"""Evaluation as a contract: a file says which episodes are played, results carry its hash."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import numpy as np

from rlinf.checkpoint.reading import Checkpoint
from rlinf.data.evaluation import (
    EpisodeOutcome,
    EvaluationResult,
    EvaluationSpec,
    compare_paired,
)
from rlinf.errors import ConfigError, RunFailure
from rlinf.monitor.video import tile, write_video
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_system import EmbodiedSystem
from rlinf.runners.evaluated_runs import evaluate_and_compare, keep_result, name_of, run_of
from rlinf.trainers.modules import POLICY
from rlinf.trainers.trainer import saved_weights

log = logging.getLogger(__name__)

EvaluationPurpose = Literal["periodic", "held_out"]
_PURPOSE_NUMBERS = {"periodic": 0, "held_out": 1}
FRAMES_PER_SECOND = 30


def evaluation_spec(
    config: EmbodiedConfig, purpose: EvaluationPurpose, episodes: int | None = None
) -> EvaluationSpec:
    """The episodes that a run is evaluated on.

    The evaluations during training and the held-out ones at the end share no seed, and neither
    shares one with training: each is drawn from the evaluation seed and its purpose.

    Args:
        config: The run's configuration.
        purpose: Which of the two lists.
        episodes: Length of the list; by default what the configuration says.
    """
    evaluation = config.evaluation
    configured = evaluation.periodic_episodes if purpose == "periodic" else evaluation.episodes
    sequence = np.random.SeedSequence((evaluation.seed, _PURPOSE_NUMBERS[purpose]))
    # 31 bits, because some simulators keep seeds in a signed 32-bit integer.
    seeds = sequence.generate_state(episodes or configured) >> 1
    env = evaluation.environments(config.env.train)
    return EvaluationSpec(
        task={
            "type": env.type,
            "options": dict(env.options),
            "ignore_terminations": env.ignore_terminations,
        },
        episodes=tuple((number, int(seed)) for number, seed in enumerate(seeds)),
        horizon=env.max_episode_steps,
        chunk=config.model.num_action_chunks,
        success=evaluation.success,
    )


def evaluate_policy(
    system: EmbodiedSystem, spec: EvaluationSpec, checkpoint: str
) -> EvaluationResult:
    """Play a specification's episodes with the weights that the rollout workers hold."""
    seeds = dict(spec.episodes)
    # A faulty episode is tried again; its last record counts.
    records = {e.episode_id: e for e in system.evaluate(spec.episodes).episodes}
    outcomes = [
        EpisodeOutcome(
            episode_id=record.episode_id,
            seed=seeds[record.episode_id],
            success_once=record.success_once,
            success_at_end=record.success_at_end,
            episode_return=record.episode_return,
            episode_len=record.episode_len,
            valid=record.valid,
        )
        for record in records.values()
    ]
    return EvaluationResult.of(spec, outcomes, checkpoint)


def film_policy(system: EmbodiedSystem, path: Path) -> Path | None:
    """Write a video of held-out episodes side by side; None, with a warning, if nothing renders."""
    config = system.config
    count = min(config.evaluation.video_episodes, config.evaluation.num_envs)
    if count == 0:
        return None
    spec = evaluation_spec(config, "held_out", config.evaluation.num_envs)
    try:
        videos = system.evaluate(spec.episodes, frames=count).frames
    except RunFailure as failure:
        log.warning("no video: %s Run `rlinf doctor` for what rendering needs.", failure)
        return None
    return write_video(path, tile(videos), FRAMES_PER_SECOND)


def evaluate(
    source: Path,
    *,
    episodes: int | None = None,
    spec: Path | None = None,
    video: bool = False,
    compare: Path | None = None,
) -> EvaluationResult:
    """Evaluate a run or a checkpoint, print the result and write it to the run's directory.

    Args:
        source: A run directory, or one of its checkpoints.
        episodes: Number of held-out episodes; by default what the run's configuration says.
        spec: File with the exact list of episodes, instead.
        video: Whether to write a video.
        compare: Another run or checkpoint to compare with on the same episodes.

    Raises:
        ConfigError: The specification is for another task than the run.
        CheckpointError: There is no good checkpoint.
    """
    given = None if spec is None else EvaluationSpec.load(spec)

    def evaluate_one(
        config: EmbodiedConfig, checkpoint: Checkpoint, first: bool
    ) -> EvaluationResult:
        nonlocal given
        given = given or evaluation_spec(config, "held_out", episodes)
        _check_task(given, config)
        return _evaluate_checkpoint(config, checkpoint, given, video=video and first)

    return evaluate_and_compare(source, compare, EmbodiedConfig, evaluate_one, compare_paired)


def _evaluate_checkpoint(
    config: EmbodiedConfig, checkpoint: Checkpoint, spec: EvaluationSpec, *, video: bool
) -> EvaluationResult:
    with EmbodiedSystem(config, training=False) as system:
        weights = saved_weights(checkpoint.tree["system"]["actor"]["trainer"], POLICY)
        system.load_policy(weights, checkpoint.step)
        result = evaluate_policy(system, spec, name_of(checkpoint))
        stem = keep_result(result, spec, checkpoint)
        if video:
            written = film_policy(system, run_of(checkpoint) / "videos" / f"{stem}.mp4")
            if written:
                print(f"video: {written}", flush=True)
    return result


def _check_task(spec: EvaluationSpec, config: EmbodiedConfig) -> None:
    own = evaluation_spec(config, "held_out")
    for name in ("task", "horizon", "chunk"):
        wanted, given = getattr(spec, name), getattr(own, name)
        if wanted != given:
            raise ConfigError(
                f"the evaluation specification is for {name} {wanted}, the run has {given}: "
                "evaluate a run of that task, or write a specification for this one"
            )
