"""Whether a trained policy looks: its success as it sees, and with one observation for all.

    python benchmarks/frozen_observation.py runs/drawer_close_pictures_ppo/latest --episodes 20
    python benchmarks/frozen_observation.py RUN --pictures    # states go on

Both sides play the same episodes, which neither the training nor an evaluation has seen, by the
policy's most likely actions. The second side shows it the first observation of one further episode
in every env at every step; with ``--pictures`` its pictures alone, beside states as they are. A
policy that succeeds there has learnt a motion and no perception.
Printed: both success rates and their ratio. One thread per process (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlinf.cli.tasks import task_of_run
from rlinf.envs.recording import Act, Actor, record_episodes
from rlinf.envs.results import Observations
from rlinf.envs.spec import EnvSpec
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.runners.record import policy_of, recorded_seeds
from rlinf.workers.config.acting import EvaluatedConfig


def frozen(actor: Actor, shown: Observations) -> Actor:
    """The same who acts, shown one observation [1, ...] in every env."""

    def unseeing(spec: EnvSpec) -> Act:
        act = actor(spec)

        def blind(observations: Observations) -> np.ndarray:
            count = len(next(iter(observations.values())))
            still = {key: np.repeat(array, count, axis=0) for key, array in shown.items()}
            return act({**observations, **still})

        return blind

    return unseeing


def first_observation(config: EvaluatedConfig, seed: int, *, pictures: bool) -> Observations:
    """What the first env of a recipe shows [1, ...] at the start of an episode, or of that the
    pictures alone."""
    section = next(iter(config.evaluated.values()))
    with SupervisedVectorEnv(
        section, num_envs=1, seed=0, purpose="eval", episode_seeds=[(0, seed)], max_chunk=1
    ) as env:
        seen = env.reset()
    if not pictures:
        return seen
    found = {key: seen[key] for key, kind in env.env_spec.observation_dtypes.items()
             if kind == "uint8"}  # fmt: skip
    if not found:
        raise SystemExit(f"there are no pictures among {', '.join(seen)}; leave out --pictures")
    return found


def success(config: EvaluatedConfig, actor: Actor, seeds: Sequence[int]) -> float:
    """Part of the episodes in which the task was solved."""
    section = next(iter(config.evaluated.values()))
    _, found = record_episodes(section, actor, list(enumerate(seeds)), num_envs=4)
    return float(np.mean([episode.success for episode in found]))


def main() -> None:
    """Play both sides and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, nargs="+", help="run directories")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--pictures", action="store_true", help="freeze pictures alone")
    given = parser.parse_args()
    what = "picture" if given.pictures else "observation"
    for run in given.run:
        config, actor, name = policy_of(task_of_run(run), run)
        other, *seeds = recorded_seeds(config, given.episodes + 1, seed=0)
        seeing = success(config, actor, seeds)
        shown = first_observation(config, other, pictures=given.pictures)
        unseeing = success(config, frozen(actor, shown), seeds)
        ratio = unseeing / seeing if seeing else float("nan")
        print(
            f"{name}: success {seeing:.2f}, with one {what} for all {unseeing:.2f}, "
            f"ratio {ratio:.2f} (n = {given.episodes})",
            flush=True,
        )


if __name__ == "__main__":
    main()
