"""Positions whose groups are drawn again: the same, whoever is faster and however many workers."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.algorithms.config import DAPOConfig
from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import GenerationRequest
from rlinf.flow.stream import Item
from rlinf.workers.generation import GenerationWorker
from rlinf.workers.group_book import GenerationReport, completion_seed

from .test_partial_rollout import Letters

GROUP, POSITIONS, FIRST = 3, 6, 20


def rewards(draw: int) -> list[float]:
    """Equal in three of five groups, and in every group of position 1."""
    equal = draw % POSITIONS == (FIRST + 1) % POSITIONS or draw % 5 > 1
    return [1.0] * GROUP if equal else [0.0, *[1.0] * (GROUP - 1)]


class Reward:
    """Scores in any order, each group after any time."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._waiting: deque[Item] = deque()
        self.scored: list[int] = []

    def give(self, position: int, group: PromptGroup) -> None:
        self.scored.append(group.draw)
        scores = tuple(Score(reward=value) for value in rewards(group.draw))
        self._waiting.append(Item(0, position, group.scored(scores)))

    def ready(self, within: float = 0.0) -> bool:
        return bool(self._waiting) and self._random.random() < 0.2

    def __next__(self) -> Item:
        self._waiting.rotate(int(self._random.integers(len(self._waiting))))
        return self._waiting.popleft()


def worker(rank: int, ranks: int) -> Any:
    """A generation worker without a model."""
    algorithm = DAPOConfig().of_family("tokens")
    made: Any = object.__new__(GenerationWorker)
    made._config = SimpleNamespace(
        rollout=SimpleNamespace(group_size=GROUP, sampling=SamplingConfig(max_new_tokens=100)),
        actor=SimpleNamespace(order="position"),
        seed=7,
    )
    made._algorithm, made._engine, made._carried = algorithm.build(), Letters(), None
    made._tools, made._restarts = None, 0
    made._rank, made._world_size = rank, ranks
    return made


def drawn(first: int, count: int) -> list[tuple[int, Prompt]]:
    return [
        (d, Prompt(prompt_id=d, text="", tokens=np.array([1, d]), answer=str(d)))
        for d in range(first, first + count)
    ]


def played(stage: Any, reward: Reward, groups: dict[int, PromptGroup]) -> GenerationReport:
    """The report of a stage, whose groups are added to others."""
    while True:
        try:
            emitted = next(stage)
        except StopIteration as stop:
            report: GenerationReport = stop.value
            return report
        if emitted.edge == "completions":
            reward.give(emitted.source, emitted.payload)
        else:
            assert emitted.source not in groups
            groups[emitted.source] = emitted.payload


def fill(
    *, ranks: int, seed: int, attempts: int
) -> tuple[dict[int, PromptGroup], list[GenerationReport], list[int]]:
    """All positions; also the reports of the workers, and the draws of all scored groups."""
    groups: dict[int, PromptGroup] = {}
    reports, scored = [], []
    for rank in range(ranks):
        reward = Reward(seed + rank)
        stage = worker(rank, ranks).generate(
            reward,
            step=0,
            positions=POSITIONS,
            prompts=drawn(FIRST, POSITIONS),
            spares=drawn(FIRST + POSITIONS, attempts * POSITIONS),
        )
        reports.append(played(stage, reward, groups))
        scored += reward.scored
    return groups, reports, scored


def tokens(groups: dict[int, PromptGroup]) -> dict[int, list[list[int]]]:
    return {
        position: [c.tokens.tolist() for c in g.completions]
        for position, g in sorted(groups.items())
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_neither_the_speed_of_the_reward_nor_the_workers_change_a_group(
    ranks: int, seed: int
) -> None:
    expected, reports, _ = fill(ranks=1, seed=100, attempts=4)
    groups, found, scored = fill(ranks=ranks, seed=seed, attempts=4)
    assert {position: group.draw for position, group in groups.items()} == {
        position: group.draw for position, group in expected.items()
    }
    assert tokens(groups) == tokens(expected)
    spares = sorted(draw for report in found for draw in report.spares)
    assert spares == sorted(reports[0].spares)
    assert sum(report.tokens for report in found) == reports[0].tokens
    assert sorted(scored) == sorted([*range(FIRST, FIRST + POSITIONS), *spares])
    assert len(set(scored)) == len(scored) == POSITIONS + len(spares) > POSITIONS


@pytest.mark.parametrize("attempts", [0, 1, 4])
def test_a_position_is_drawn_again_so_often_and_keeps_its_last_group(attempts: int) -> None:
    groups, (report,), _ = fill(ranks=1, seed=0, attempts=attempts)
    assert sorted(groups) == list(range(POSITIONS))
    expected, spares = {}, []
    for position in range(POSITIONS):
        draws = [FIRST + position + attempt * POSITIONS for attempt in range(attempts + 1)]
        worth = [len(set(rewards(draw))) > 1 for draw in draws]
        taken = worth.index(True) if True in worth else attempts
        expected[position] = draws[taken]
        spares += draws[1 : taken + 1]
    assert {position: group.draw for position, group in groups.items()} == expected
    assert groups[1].draw == FIRST + 1 + attempts * POSITIONS, "no group of position 1 is worth it"
    assert sorted(report.spares) == sorted(spares)
    for group in groups.values():
        seeds = [completion.seed for completion in group.completions]
        assert seeds == [completion_seed(7, group.draw, place) for place in range(GROUP)]


def test_each_step_tells_of_the_engines_that_were_replaced_since_the_one_before() -> None:
    made, told = worker(0, 1), []
    for restarts in (1, 1, 3):
        made._engine.restarts = restarts
        reward = Reward(0)
        stage = made.generate(reward, step=0, positions=2, prompts=drawn(FIRST, 2))
        told.append(played(stage, reward, {}).engine_restarts)
    assert told == [1, 0, 2]


def test_log_probs_are_used_in_training_alone() -> None:
    """An evaluation may draw by filters that an engine cannot score."""
    made, reward = worker(0, 1), Reward(0)
    asked: list[bool] = []
    submit = made._engine.submit

    def note(request: GenerationRequest) -> None:
        asked.append(request.scored)
        submit(request)

    made._engine.submit = note
    sampling = SamplingConfig(max_new_tokens=100, top_p=0.9)
    for emitted in made.evaluate(
        reward, prompts=drawn(0, 2), seeds=[[3, 4, 5], [6, 7, 8]], sampling=sampling
    ):
        reward.give(emitted.source, emitted.payload)
    assert asked == [False] * 2 * GROUP
    asked.clear()
    stage = made.generate(Reward(0), step=0, positions=2, prompts=drawn(0, 2))
    next(stage)
    assert asked == [True] * 2 * GROUP
