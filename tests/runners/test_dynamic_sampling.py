"""Prompts drawn again for groups with equal rewards: the same bits, whoever is faster."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers")

from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.run import Run
from rlinf.workers.reward import RewardReport, RewardWorker

from .reasoning_support import assert_equal_runs, small_config, train, untimed
from .test_reasoning import PLACEMENTS, StopAfter, needs_two_cores
from .test_staleness import placed

POSITIONS, MOST = 8, 2
AGAIN = (
    f"algorithm={{type: dapo, max_resample: {MOST}}}",
    f"rollout.prompts={POSITIONS}",
    "rollout.group_size=2",
    # So that what is drawn again waits for a place, whose moment then changes what ends first.
    "rollout.engine={type: hf, deterministic: true, block_size: 4, max_running_requests: 6}",
)
IN_ORDER = "actor={type: fsdp, n_minibatches: 2, shuffle: false, optim: {lr: 1.0e-3}}"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("again"), *AGAIN)


def rejected(run: Path) -> list[float]:
    return [line["rollout/rejected_groups"] for line in untimed(run)[1:]]


class UnevenReward(RewardWorker):
    """Lets groups wait for a random time, and scores those that came meanwhile in any order."""

    seed: ClassVar[int] = 0
    found: ClassVar[list[tuple[int, int, list[list[int]]]]] = []

    def score(self, completions: Any, keep: int = 0) -> Generator[Any, None, RewardReport]:
        draw = random.Random(self.seed)
        assert self._pool is not None
        report = RewardReport(values={name: [] for name in self._reward.functions})
        for first in completions:
            time.sleep(draw.choice([0, 0.02, 0.1]))
            items = [first]
            while completions.ready():
                items.append(next(completions))
            draw.shuffle(items)
            for item in items:
                tokens = [c.tokens.tolist() for c in item.payload.completions]
                self.found.append((item.payload.draw, item.source, tokens))
                yield from self._scored(self._pool, [item], report)
        report.faults = dict(Counter(self._pool.take_faults()))
        return report


@pytest.mark.parametrize(
    "partial",
    [pytest.param(False, id="whole"), pytest.param(True, id="partial", marks=pytest.mark.slow)],
)
def test_the_speed_of_the_reward_changes_nothing(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    more = (*AGAIN, "rollout.partial={oversample: 1.5, schedule: history}") if partial else AGAIN
    expected = train(tmp_path / "even", *more) if partial else reference
    assert sum(rejected(expected)) > 0
    monkeypatch.setitem(Reasoning.groups, "reward", UnevenReward)
    found = []
    for seed in (1, 2):
        monkeypatch.setattr(UnevenReward, "seed", seed)
        monkeypatch.setattr(UnevenReward, "found", [])
        assert_equal_runs(expected, train(tmp_path / str(seed), *more))
        found.append(sorted(UnevenReward.found))
    assert found[0] == found[1]


def test_equal_groups_are_drawn_again_within_the_bound(reference: Path) -> None:
    counts = rejected(reference)
    assert sum(counts) > 0
    assert max(counts) <= POSITIONS * MOST
    assert untimed(reference)[-1]["rollout/prompts"] == 4 * POSITIONS + sum(counts)


@needs_two_cores
@pytest.mark.parametrize(
    "placement",
    [
        "two engines",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS if "two" not in name),
    ],
)
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path, placement: str) -> None:
    assert_equal_runs(reference, train(tmp_path, *AGAIN, *placed(placement)))


@pytest.mark.slow
@needs_two_cores
def test_two_engines_on_ray_give_the_same_bits(reference: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *AGAIN, "cluster.runtime=ray", *placed("two engines"))
    assert_equal_runs(reference, run)


@pytest.mark.slow
@needs_two_cores
def test_positions_that_are_trained_on_at_once(tmp_path: Path) -> None:
    """With rollouts that run ahead, and engines beside the actor."""
    more = (*AGAIN, IN_ORDER, "rollout.max_staleness=1")
    one = train(tmp_path / "one", *more)
    assert sum(rejected(one)) > 0
    assert_equal_runs(one, train(tmp_path / "two", *more, *placed("disaggregated")))


@pytest.mark.parametrize("questions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_interrupted_and_resumed(reference: Path, tmp_path: Path, questions: int) -> None:
    run = train(tmp_path, *AGAIN, stop=StopAfter(questions))
    assert 0 < sum(rejected(run)) < sum(rejected(reference))
    with RunDirectory.open(run) as directory:
        Run(Reasoning, small_config(tmp_path, *AGAIN), directory, threading.Event()).run(
            resume=True
        )
    assert_equal_runs(reference, run)
