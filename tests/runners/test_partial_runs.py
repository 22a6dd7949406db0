"""Runs whose longest answers are interrupted and go on under newer weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.errors import UserError
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.run import Run

from .reasoning_support import assert_equal_runs, small_config, train, untimed
from .test_reasoning import StopAfter, needs_two_cores
from .test_staleness import placed

PARTIAL = (
    "rollout.partial={oversample: 1.5, schedule: longest_first}",
    "rollout.engine={type: hf, deterministic: true, block_size: 4, max_running_requests: 10}",
)
OLD = "rollout.partial.max_token_staleness"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("partial"), *PARTIAL)


def test_answers_go_on_under_newer_weights(reference: Path) -> None:
    lines = untimed(reference)[1:]
    assert all(line["rollout/carried"] == 2 for line in lines), "6 groups for 4 positions"
    assert lines[-1]["rollout/prompts"] == 4 * 4 + 2
    assert lines[0]["rollout/staleness_max"] == 0
    assert max(line["rollout/staleness_max"] for line in lines) >= 1
    assert max(line["rollout/interrupted"] for line in lines) >= 1


@pytest.mark.slow
@needs_two_cores
def test_placements_give_the_same_bits(reference: Path, tmp_path: Path) -> None:
    assert_equal_runs(reference, train(tmp_path, *PARTIAL, *placed("disaggregated")))


AHEAD = ("rollout.max_staleness=1",)


@pytest.mark.parametrize(
    "more", [(), pytest.param(AHEAD, marks=pytest.mark.slow)], ids=["in step", "ahead"]
)
def test_an_interrupted_run_loses_no_group(
    reference: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    whole = train(tmp_path / "whole", *PARTIAL, *more) if more else reference
    run = train(tmp_path / "cut", *PARTIAL, *more, stop=StopAfter(2))
    assert len(untimed(run)) < 5
    with RunDirectory.open(run) as directory:
        config = small_config(tmp_path / "cut", *PARTIAL, *more)
        Run(Reasoning, config, directory, threading.Event()).run(resume=True)
    assert_equal_runs(whole, run)


@pytest.mark.slow
@needs_two_cores
def test_two_engines_on_ray(tmp_path: Path) -> None:
    lines = untimed(train(tmp_path, *PARTIAL, "cluster.runtime=ray", *placed("two engines")))[1:]
    assert [line["rollout/carried"] for line in lines] == [2] * 4
    assert lines[-1]["rollout/prompts"] == 4 * 4 + 2


@pytest.mark.slow
@pytest.mark.parametrize("too_old", ["mask", "drop"])
def test_tokens_beyond_the_bound(tmp_path: Path, too_old: str) -> None:
    lines = untimed(train(tmp_path, *PARTIAL, f"{OLD}=1", f"rollout.partial.too_old={too_old}"))[1:]
    counted = {"mask": "masked_tokens", "drop": "dropped_tokens"}[too_old]
    for line in lines:
        assert line["rollout/staleness_max"] <= 1 or line[f"rollout/{counted}"] > 0
        assert line["actor/optimizer_steps"] == 2


def test_a_bound_that_nothing_could_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nearest: 3"):
        small_config(tmp_path, *PARTIAL, f"{OLD}=2", "rollout.max_staleness=2")
