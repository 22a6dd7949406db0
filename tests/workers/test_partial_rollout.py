"""Partial rollouts: every group that was begun is trained on once, in one piece."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from rlinf.checkpoint.tree import decode, encode
from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest
from rlinf.flow.stream import Emit, Item
from rlinf.workers.carried_groups import CarryBook
from rlinf.workers.config.answering import PartialRolloutConfig
from rlinf.workers.filling import Filling
from rlinf.workers.group_book import completion_seed

GROUP, POSITIONS = 3, 4


def length_of(seed: int) -> int:
    """A long tail: most answers are short."""
    return 1 + int(np.random.default_rng(seed).geometric(0.2))


class Letters(Engine):
    """Gives the n-th token of an answer as n plus its seed, until its length is reached."""

    def __init__(self) -> None:
        self.version = 0
        self.steps = 0
        self._running: dict[int, tuple[GenerationRequest, list[tuple[int, int]]]] = {}

    def submit(self, request: GenerationRequest) -> None:
        assert request.request_id not in self._running
        begun = request.partial
        given = [] if begun is None else list(zip(begun.tokens, begun.versions, strict=True))
        self._running[request.request_id] = (request, given)

    def step(self) -> list[FinishedCompletion]:
        self.steps += 1
        ended = []
        for number, (request, tokens) in list(self._running.items()):
            tokens.append(((request.seed + len(tokens)) % 997, self.version))
            if len(tokens) == length_of(request.seed):
                ended.append(self._end(number, "stop"))
        return ended

    def _end(self, number: int, reason) -> FinishedCompletion:
        request, tokens = self._running.pop(number)
        completion = Completion(
            tokens=np.array([token for token, _ in tokens], np.int64),
            log_probs=np.zeros(len(tokens), np.float32),
            versions=np.array([version for _, version in tokens], np.int64),
            stop_reason=reason,
            seed=request.seed,
        )
        return FinishedCompletion(request_id=number, completion=completion)

    @property
    def unfinished(self) -> int:
        return len(self._running)

    def progress(self) -> dict[int, int]:
        return {number: len(tokens) for number, (_, tokens) in self._running.items()}

    def abort(self, request_ids=None) -> list[FinishedCompletion]:
        return [self._end(number, "abort") for number in list(self._running)]

    def update_weights(self, weights, version: int) -> None:
        self.version = version

    def release_memory(self) -> None:
        """It has none."""

    def restore_memory(self) -> None:
        """It has none."""

    def close(self) -> None:
        """It holds nothing."""


class LettersAhead(Letters):
    """Goes on by a token before it hears of an abort, as one that generates between the steps."""

    generates_between_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.late = 0

    def abort(self, request_ids=None) -> list[FinishedCompletion]:
        ended = self.step()
        self.late += len(ended)
        return [*ended, *super().abort(request_ids)]


class Run:
    """Step after step of one worker, with a reward that answers in any order."""

    def __init__(self, worth=lambda group: True, engine=Letters, **options) -> None:
        self.engine = engine()
        self.options = {"oversample": 1.5, **options}
        self.worth = worth
        self.book = self.new_book()
        self.drawn = 0
        self.trained: list[list[PromptGroup]] = []
        self.reports = []
        self.random = np.random.default_rng(0)

    def new_book(self) -> CarryBook:
        return CarryBook(
            PartialRolloutConfig(**self.options),
            GROUP,
            SamplingConfig(max_new_tokens=100),
            lambda draw: [completion_seed(7, draw, place) for place in range(GROUP)],
            self.worth,
        )

    def draw(self, count: int):
        draws = range(self.drawn, self.drawn + count)
        self.drawn += count
        tokens = np.array([1, 2], np.int64)
        return [
            (d, Prompt(prompt_id=d % 5, text="", tokens=tokens.copy(), answer=str(d)))
            for d in draws
        ]

    def step(self, spares: int = 0):
        step = len(self.trained)
        waiting: deque[Item] = deque()

        class Scored:
            def __next__(inner) -> Item:
                waiting.rotate(int(self.random.integers(len(waiting))))
                return waiting.popleft()

        at_once = math.ceil(POSITIONS * self.options["oversample"])
        prompts = self.draw(POSITIONS if step else at_once)
        extra = self.draw(spares)
        groups: dict[int, PromptGroup] = {}
        requests = self.book.begin(step, range(8, 8 + POSITIONS), prompts, extra)
        drive(Filling(self.book, self.engine).run(requests, Scored()), waiting, groups)
        report = self.book.report
        assert sorted(groups) == list(range(8, 8 + POSITIONS))
        self.drawn -= spares - len(report.spares)
        self.trained.append([groups[position] for position in sorted(groups)])
        self.reports.append(report)
        self.engine.update_weights((), step + 1)
        return report


def drive(stage: Iterator[Emit], waiting: deque[Item], groups: dict[int, PromptGroup]) -> None:
    """Score what is complete, collect what fills a position."""
    for emitted in stage:
        assert 8 <= emitted.source < 8 + POSITIONS
        if emitted.edge == "groups":
            assert emitted.source not in groups
            groups[emitted.source] = emitted.payload
        else:
            scores = (Score(reward=float(emitted.payload.draw % 3)),) * GROUP
            waiting.append(Item(0, emitted.source, emitted.payload.scored(scores)))


def check_whole(group: PromptGroup) -> None:
    """No token is missing, doubled, or out of order, and weights only get newer."""
    assert len(group.completions) == GROUP
    assert group.answer == str(group.draw)
    for completion in group.completions:
        assert len(completion) == length_of(completion.seed)
        expected = (completion.seed + np.arange(len(completion))) % 997
        assert completion.tokens.tolist() == expected.tolist()
        assert (np.diff(completion.versions) >= 0).all()


@pytest.mark.parametrize("engine", [Letters, LettersAhead])
@pytest.mark.parametrize("schedule", ["fifo", "longest_first", "history"])
def test_nothing_is_lost_or_doubled(schedule: str, engine: type[Letters]) -> None:
    run = Run(schedule=schedule, engine=engine)
    for _ in range(12):
        run.step()
    assert engine is Letters or run.engine.late > 0
    trained = [group for step in run.trained for group in step]
    draws = [group.draw for group in trained]
    assert len(set(draws)) == len(draws) == 12 * POSITIONS
    for group in trained:
        check_whole(group)
    state = run.book.state()
    for group in state["open"]:
        begun = [c and c["fields"]["stop_reason"] for c in group["fields"]["completions"]]
        assert None in begun or "abort" in begun, "a complete group waits for its scores for ever"
    left = [group["fields"] for group in [*state["open"], *state["scored"]]]
    assert sorted([*draws, *(group["draw"] for group in left)]) == list(range(run.drawn))
    kept = [c for group in left for c in group["completions"] if c is not None]
    sampled = sum(len(c) for group in trained for c in group.completions)
    assert sampled + sum(len(c["fields"]["tokens"]) for c in kept) == sum(
        report.tokens for report in run.reports
    )
    assert sum(report.interrupted for report in run.reports) > 0
    ages = [v.max() - v.min() for g in trained for c in g.completions for v in [c.versions]]
    assert max(ages) > 0, "some answers were continued under newer weights"


def test_it_takes_fewer_engine_steps_than_waiting_for_the_last() -> None:
    run = Run(oversample=2)
    for _ in range(12):
        run.step()
    lengths = [
        max(len(completion) for group in step for completion in group.completions)
        for step in run.trained
    ]
    assert run.engine.steps < sum(lengths)


@pytest.mark.parametrize("engine", [Letters, LettersAhead])
def test_rejected_groups_make_room_for_spares(engine: type[Letters]) -> None:
    run = Run(worth=lambda group: group.draw % 3 != 0, engine=engine)
    for _ in range(6):
        run.step(spares=40)
    draws = [group.draw for step in run.trained for group in step]
    assert all(draw % 3 for draw in draws)
    assert len(set(draws)) == len(draws) == 6 * POSITIONS
    spares = [draw for report in run.reports for draw in report.spares]
    rejected = len(spares)
    assert rejected == len(set(spares)) > 0
    assert len(draws) + rejected + len(run.book) == run.drawn


@pytest.mark.parametrize("schedule", ["fifo", "history"])
def test_the_pool_is_part_of_the_checkpoint(schedule: str) -> None:
    run = Run(schedule=schedule)
    for _ in range(4):
        run.step()
    encoded = encode(run.book.state())
    other = Run(schedule=schedule)
    other.drawn, other.engine.version = run.drawn, run.engine.version
    other.trained = list(run.trained)
    state = decode(encoded.structure, encoded.tensors())
    other.book.load_state([state], 0, 1)
    for _ in range(4):
        run.step()
        other.step()
    for mine, theirs in zip(run.trained[4:], other.trained[4:], strict=True):
        assert [g.draw for g in mine] == [g.draw for g in theirs]
        for one, two in zip(mine, theirs, strict=True):
            check_whole(two)
            for left, right in zip(one.completions, two.completions, strict=True):
                assert left.versions.tolist() == right.versions.tolist()


def test_another_number_of_workers_shares_the_pool() -> None:
    run = Run()
    for _ in range(3):
        run.step()
    whole = [group["fields"]["draw"] for group in run.book.state()["open"]]
    pools = [run.new_book() for _ in range(2)]
    for rank, pool in enumerate(pools):
        pool.load_state([run.book.state()], rank, 2)
    shares = [[g["fields"]["draw"] for g in pool.state()["open"]] for pool in pools]
    assert sorted(shares[0] + shares[1]) == sorted(whole)
    assert sum(len(pool) for pool in pools) == len(run.book)


def test_groups_that_are_too_old_are_generated_anew() -> None:
    run = Run(max_token_staleness=1, too_old="drop", schedule="longest_first", oversample=2)
    for _ in range(12):
        run.step()
    for step, groups in enumerate(run.trained):
        for group in groups:
            check_whole(group)
            assert all(step - c.versions.min() <= 1 for c in group.completions)
    draws = [group.draw for step in run.trained for group in step]
    assert len(set(draws)) == len(draws)
    assert sum(report.regenerated for report in run.reports) > 0
    assert sum(report.dropped_tokens for report in run.reports) > 0


def test_schedules_order_what_is_carried() -> None:
    run = Run()
    book = run.new_book()
    begun = book._begin(run.draw(6))
    completions = {0: 3, 2: 9, 4: 5}
    for draw, length in completions.items():
        number = draw * GROUP
        book._requests([begun[draw]])
        finished = Completion(
            tokens=np.zeros(length, np.int64),
            log_probs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int64),
            stop_reason="abort",
            seed=0,
        )
        book.take([FinishedCompletion(request_id=number, completion=finished)])
    orders = {}
    for schedule in ("fifo", "longest_first", "history"):
        book._config = PartialRolloutConfig(schedule=schedule)
        book._lengths = {0: 4.0, 1: 9.0, 2: 1.0, 3: 2.0}
        orders[schedule] = [group.draw for group in book.in_order([])]
    assert orders["fifo"] == [0, 1, 2, 3, 4, 5]
    assert orders["longest_first"] == [2, 4, 0, 1, 3, 5]
    assert orders["history"] == [4, 1, 0, 5, 3, 2]


def test_a_bound_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="no effect without max_token_staleness"):
        PartialRolloutConfig(too_old="drop")
