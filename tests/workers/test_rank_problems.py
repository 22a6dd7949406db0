"""Batches and ranks that do not go together: whoever follows the hint is not refused again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from rlinf.errors import UserError
from rlinf.workers.config.acting import rank_problems
from tests.runners import support
from tests.runners.reasoning_support import small_config as reasoning_config


@dataclass
class Batches:
    global_batch_size: int
    micro_batch_size: int | None = None


def found(batch: int, ranks: int, micro: int | None, whole: int | None) -> list[str]:
    problems = rank_problems(Batches(batch, micro), ranks, "samples", whole=whole)
    return [problem.message() for problem in problems]


def advised(message: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", message.rpartition("nearest:")[2])]


@pytest.mark.parametrize("whole", [None, 36, 40, 49])
def test_what_is_advised_is_legal(whole: int | None) -> None:
    for batch, ranks, micro in product(range(1, 50), range(1, 6), (None, 1, 2, 3)):
        for message in found(batch, ranks, micro, whole):
            assert advised(message), message
            for value in advised(message):
                if message.startswith("places"):
                    assert whole is not None
                    assert whole % value == 0
                elif "of a rank" in message:
                    assert found(batch, ranks, value, whole) == []
                else:
                    left = found(value, ranks, micro, whole)
                    # Whole micro batches come into it where there are such.
                    assert all("of a rank" in each for each in left), message
                    possible = whole is None or whole % (ranks * (micro or 1)) == 0
                    assert not (left and possible), message


TWO = "cluster={cpu_devices_per_node: 2, component_placement: {'env,rollout': 0, actor: 0-1}}"
THREE = TWO.replace("0-1", "0-2").replace("node: 2", "node: 3")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([TWO, "actor.global_batch_size=125"], "does not divide over 2 actor ranks; "),
        ([TWO, "actor.global_batch_size=124"], "does not divide 500 samples (10 environments × "),
        (
            [THREE],
            "places 3 actor ranks, and no batch that divides 500 "
            "samples (10 environments × 50 chunk steps) divides over them; nearest: 2, 4 actor",
        ),
    ],
)
def test_of_a_rollout_over_ranks(
    tmp_path: Path, overrides: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    given = ["env.num_envs=10", "rollout.steps=50", "actor.micro_batch_size=null", *overrides]
    with pytest.raises(UserError, match="1 problem") as refused:
        support.small_config(tmp_path, *given)
    assert told in str(refused.value)
    if overrides != [THREE]:
        assert "nearest: 100, 250" in str(refused.value)
        support.small_config(tmp_path, *given, "actor.global_batch_size=250")


def test_ranks_that_share_a_layer_are_advised_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    placed = (
        "cluster={runtime: ray, cpu_devices_per_node: 4, "
        "component_placement: {'rollout,reward': 0, actor: 0-3}}"
    )
    sizes = ["rollout.prompts=3", "rollout.group_size=3", "actor.n_minibatches=1"]
    with pytest.raises(UserError) as refused:
        reasoning_config(tmp_path, placed, *sizes, "actor.tensor_parallel_size=2")
    told = "does not divide over 4 actor ranks, of which 2 share a layer; nearest: 2, 6 ranks"
    assert told in str(refused.value)
