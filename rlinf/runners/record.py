"""Records episodes in the simulator of a recipe: what its expert does, or a trained policy."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from rlinf.data.demonstrations import Demonstrations
from rlinf.envs.base import INSTRUCTION_KEY
from rlinf.envs.recording import Act, Actor, BrokenRecording, expert_of, record_episodes
from rlinf.envs.results import TASK_IDS, Observations
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError, RunFailure
from rlinf.models.policy import ActingThreads, draw_noise, drawn_in_evaluation
from rlinf.runners.embodied_evaluation import EpisodeEvaluator, TrainedPolicy
from rlinf.runners.task import Purpose, Task
from rlinf.scheduler.accelerators import process_device
from rlinf.workers.config.acting import EvaluatedConfig

log = logging.getLogger(__name__)
_FRAME_RATE = 30.0
"""Of sets of simulators that do not say theirs."""
_PURPOSE = 2
"""Number of recordings among the purposes of episodes; evaluations have 0 and 1."""


def recorded_seeds(config: EvaluatedConfig, count: int, seed: int) -> list[int]:
    """Seeds of episodes to record, none of which an evaluation of the recipe plays."""
    evaluated = {
        each for purpose in get_args(Purpose)
        for _, each in EpisodeEvaluator(config).spec(purpose).episodes
    }  # fmt: skip
    sequence = np.random.SeedSequence((config.evaluation.seed, _PURPOSE, seed))
    # 31 bits, because some simulators keep seeds in a signed 32-bit integer.
    drawn = (sequence.generate_state(count + len(evaluated)) >> 1).tolist()
    return [each for each in drawn if each not in evaluated][:count]


def policy_of(
    task: type[Task[Any]], run: Path, overrides: Sequence[str] = (), *, seed: int = 0
) -> tuple[EvaluatedConfig, Actor, str]:
    """The recipe of a run with ``overrides`` (``key=value``), its policy as who acts, as it is
    evaluated (where its actions are drawn, from the ``seed``; on the accelerator, where there is
    one), and what it is called."""
    trained = TrainedPolicy(task, run, overrides)
    by_mode = trained.config.evaluation.deterministic

    def actor(spec: EnvSpec) -> Act:
        place = process_device()
        policy = trained.build(spec).to(place)
        threads, generator = ActingThreads(policy), torch.Generator().manual_seed(seed)
        specs = {} if by_mode else drawn_in_evaluation(policy)

        def act(observations: Observations) -> np.ndarray:
            seen = {name: torch.from_numpy(each).to(place) for name, each in observations.items()}
            rows = len(next(iter(seen.values())))
            threads.choose(rows)
            noise = draw_noise(specs, (rows,), generator)
            drawn = {name: each.to(place) for name, each in noise.items()}
            return policy.sample(seen, drawn or None).actions.cpu().numpy()

        return act

    return trained.config, actor, trained.name + ("" if by_mode else ", by drawn actions")


def record(
    config: EvaluatedConfig,
    out: Path,
    *,
    actor: Actor | None = None,
    name: str = "expert",
    episodes: int,
    num_envs: int,
    seed: int = 0,
    noise: float = 0.0,
    form: LeRobotFormat | None = None,
    stop: threading.Event | None = None,
) -> tuple[Demonstrations, Path]:
    """Play episodes and write them to a directory, which is returned beside them.

    Args:
        config: The recipe whose environment is played in.
        out: Directory of the set; if another recording has made it meanwhile, the next free one of
            `out-2`, `out-3`, … takes its place.
        actor: Who acts; None: the expert of the simulator.
        name: What they are called.
        episodes: How many.
        num_envs: Envs at the same time, at most.
        seed: Of the episodes and of the noise.
        noise: Standard deviation of what disturbs the executed actions, in units of the action.
        form: That the set is written in; None: the format of this project.
        stop: Once it is set, the episodes that have ended are written; as they are before a
            failure in the midst of it is raised.

    Raises:
        ConfigError: The simulator has no expert, there are several simulators, or there is noise
            on discrete actions.
        RunFailure: Every episode was faulty, or none had ended; or the simulator fails too often.
    """
    env, *others = config.evaluated.values()
    if others:
        raise ConfigError(
            f"lists {len(others) + 1} simulators, and recorded episodes are of one; nearest: a "
            "recipe with one of its sections",
            key="env.train",
        )
    seeds = recorded_seeds(config, episodes, seed)
    played_by = actor or expert_of(env)

    def acting(spec: EnvSpec) -> Act:
        if form is not None:
            form.check(spec)
        if noise and spec.action_kind == "discrete":
            raise ConfigError(
                f"--noise = {noise} is added to actions, and the environment takes one of "
                f"{spec.action_high[0] - spec.action_low[0] + 1:.0f}; nearest: 0"
            )
        _warn_of_wide_noise(noise, spec)
        return played_by(spec)

    failure: BaseException | None = None
    try:
        spec, found = record_episodes(
            env,
            acting,
            list(enumerate(seeds)),
            num_envs=num_envs,
            seed=seed,
            noise=noise,
            stop=stop,
        )
    except BrokenRecording as broken:
        failure, spec, found = broken.__cause__, broken.spec, broken.episodes
    interrupted = failure is not None or (stop is not None and stop.is_set())
    if not found and interrupted:
        raise RunFailure(f"no episode of {episodes} had ended: nothing is written")
    if not found:
        raise RunFailure(
            f"none of {episodes} episodes was recorded: the simulator failed in all, as said above"
        )
    played = {"type": env.type, "options": dict(env.options), "horizon": env.max_episode_steps}
    left_out = {"interrupted": True} if interrupted else {"faulty": episodes - len(found)}
    source = {"env": played, "spec": spec.to_json(), "actor": name, "seed": seed, "noise": noise,
              **left_out}  # fmt: skip
    whole = Demonstrations.of(found, source)
    free = next(each for each in _places(out) if not each.exists())
    (Demonstrations.save if form is None else form.write)(whole, free)
    if failure is not None:
        log.warning("the %d of %d episodes that had ended before the failure are written to %s",
                    len(found), episodes, free)  # fmt: skip
        raise failure
    return whole, free


def _warn_of_wide_noise(noise: float, spec: EnvSpec) -> None:
    """Say of which actions the noise, one number for all of their units, leaves little: where it is
    more than half of what there is on either side of the middle, many that are executed are a
    bound."""
    limits = list(zip(spec.action_low, spec.action_high, strict=True))
    wide = [number for number, (low, high) in enumerate(limits) if noise > (high - low) / 4]
    if not wide:
        return
    narrowest = min(wide, key=lambda number: limits[number][1] - limits[number][0])
    low, high = limits[narrowest]
    log.warning(
        "--noise %g is in the units of each action, and leaves little of action %d, which goes "
        "from %g to %g%s; nearest: at most %.2g",
        noise, narrowest, low, high,
        f" (and of {len(wide) - 1} more)" if len(wide) > 1 else "", (high - low) / 4,
    )  # fmt: skip


def _places(out: Path) -> Iterator[Path]:
    yield out
    yield from (out.with_name(f"{out.name}-{number}") for number in itertools.count(2))


@dataclass(frozen=True)
class LeRobotFormat:
    """Writes sets that lerobot opens.

    Args:
        pictures: How pictures are kept.
        fps: Frames per second; None: the control rate of the environment.
    """

    pictures: Literal["video", "image"]
    fps: float | None

    def __post_init__(self) -> None:
        from rlinf.data.lerobot.layout import av, parquet

        parquet()
        if self.pictures == "video":
            av()

    def check(self, spec: EnvSpec) -> None:
        """Refuse an environment whose episodes could not be written, before any is played."""
        from rlinf.data.lerobot.layout import check_video_size, features_of

        fps, rate = self.fps, spec.control_rate
        if fps is not None and rate is not None and fps != rate:
            raise ConfigError(
                f"--fps = {fps:g}, the environment acts {rate:g} times a second; nearest: {rate:g},"
                " or leave it out"
            )
        for key, shape in spec.of_present().observation_shapes.items():
            if key in (TASK_IDS, INSTRUCTION_KEY):
                continue
            features_of(key, shape)
            if self.pictures == "video" and len(shape) > 2:  # of one camera or of several
                check_video_size(*shape[-3:-1])

    def write(self, whole: Demonstrations, out: Path) -> None:
        """Write a set to a directory."""
        from rlinf.data.lerobot.writer import write_lerobot

        rate = self.fps or whole.source["spec"].get("control_rate")
        if rate is None:
            log.warning(
                "the environment does not say how often it acts: %s is written with %g frames a "
                "second; --fps gives its rate",
                out, _FRAME_RATE,
            )  # fmt: skip
        write_lerobot(whole, out, fps=rate or _FRAME_RATE, pictures=self.pictures)
