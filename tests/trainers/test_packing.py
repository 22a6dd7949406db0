"""Division of sequences over ranks and micro batches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.trainers import packing
from rlinf.trainers.config import SequenceConfig
from rlinf.trainers.packing import balanced_parts, plan_micro_batches
from tests.trainers.language_models import random_batch

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths=lengths_strategy, parts=st.integers(1, 6), equal_count=st.booleans())
@settings(max_examples=150)
def test_every_number_is_in_one_part(lengths, parts, equal_count):
    divided = balanced_parts(lengths, parts, equal_count=equal_count)
    assert len(divided) == parts
    assert sorted(itertools.chain(*divided)) == list(range(len(lengths)))
    if equal_count:
        counts = [len(part) for part in divided]
        assert max(counts) - min(counts) <= 1


def test_differencing_finds_what_greedy_misses():
    """The classic example: greedy gives 16 and 14, differencing is no worse, the best is 15."""
    lengths = [8, 7, 6, 5, 4]
    sums = [sum(lengths[i] for i in p) for p in balanced_parts(lengths, 2, equal_count=False)]
    assert abs(sums[0] - sums[1]) == 2


def test_balance_beats_consecutive_blocks():
    lengths = [100, 90, 80, 70, 1, 2, 3, 4]
    sums = [sum(lengths[i] for i in p) for p in balanced_parts(lengths, 2, equal_count=True)]
    assert max(sums) - min(sums) <= 10
    assert sum(lengths[:4]) - sum(lengths[4:]) == 330


@given(
    lengths=lengths_strategy,
    ranks=st.integers(1, 4),
    balance=st.booleans(),
    padded=st.booleans(),
    sequences=st.one_of(st.none(), st.integers(1, 7)),
    tokens=st.one_of(st.none(), st.integers(20, 150)),
    group_size=st.integers(1, 9),
)
@settings(max_examples=300)
def test_plan_is_complete_and_equal_on_all_ranks(
    lengths, ranks, balance, padded, sequences, tokens, group_size
):
    config = SequenceConfig(
        micro_batch_size=None if tokens is not None else sequences,
        max_tokens_per_micro_batch=tokens,
        packing=not padded,
        balance=balance,
    )
    prompts = [index // group_size for index in range(len(lengths))]
    plan = plan_micro_batches(lengths, prompts, ranks=ranks, config=config)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    flat = [part for micro_batches in plan for part in micro_batches]
    assert sorted(itertools.chain(*flat)) == list(range(len(lengths)))
    for part in flat:
        if config.micro_batch_size is not None:
            assert len(part) <= config.micro_batch_size
        if tokens is not None and len(part) > 1:
            sizes = [lengths[index] for index in part]
            assert (len(part) * max(sizes) if padded else sum(sizes)) <= tokens


def test_a_budget_is_filled():
    config = SequenceConfig(max_tokens_per_micro_batch=100)
    (plan,) = plan_micro_batches([10] * 40, list(range(40)), ranks=1, config=config)
    assert [len(part) for part in plan] == [10] * 4


def test_a_budget_that_differencing_misses_is_kept_by_no_more_parts():
    """Differencing into two parts gives sums of 14 and 16."""
    config = SequenceConfig(max_tokens_per_micro_batch=15)
    (plan,) = plan_micro_batches([6, 6, 7, 8, 3], list(range(5)), ranks=1, config=config)
    assert sorted(map(sorted, plan)) == [[0, 1, 4], [2, 3]]


def test_sequences_above_half_the_budget_are_planned_by_few_divisions(monkeypatch):
    """The sum asks for 60 micro batches and 100 are needed: not every number between is tried."""
    asked = []

    def counted(lengths, parts, *, equal_count):
        asked.append(parts)
        return balanced_parts(lengths, parts, equal_count=equal_count)

    monkeypatch.setattr(packing, "balanced_parts", counted)
    config = SequenceConfig(max_tokens_per_micro_batch=100)
    (plan,) = plan_micro_batches([60] * 100, [0] * 100, ranks=1, config=config)
    assert sorted(plan) == [[index] for index in range(100)]
    assert len(asked) <= 4


def test_a_batch_is_planned_once(monkeypatch):
    """It is scored by several modules before it is trained."""
    plans = []

    def counted(*arguments, **keys):
        plans.append(plan_micro_batches(*arguments, **keys))
        return plans[-1]

    monkeypatch.setattr(packing, "plan_micro_batches", counted)
    sequences = packing.Sequences(SequenceConfig(max_tokens_per_micro_batch=20))
    batch = random_batch()
    assert sequences.plan(batch, 2) == sequences.plan(batch, 2) == plans[0]
    assert len(plans) == 1
    half = batch.select(slice(0, len(batch) // 2))
    assert sequences.plan(half, 2) != sequences.plan(batch, 2)
    assert sequences.plan(batch, 1) != sequences.plan(batch, 2)


@pytest.mark.parametrize("bound", [{"max_tokens_per_micro_batch": 80}, {"micro_batch_size": 8}])
def test_answers_to_one_prompt_stay_together(bound):
    """In whatever order they come; 12 answers to a prompt exceed the budget and are divided."""
    prompts = [0, 1, 2, 3] * 4 + [4] * 12
    config = SequenceConfig(**bound)
    (plan,) = plan_micro_batches([10] * 28, prompts, ranks=1, config=config)
    found = [{prompts[index] for index in part} for part in plan]
    assert sum(map(len, found)) <= 7
    assert len(found) == 4


@pytest.mark.parametrize("balance", [True, False])
def test_fewer_sequences_than_ranks(balance):
    config = SequenceConfig(micro_batch_size=2, balance=balance)
    plan = plan_micro_batches([5, 6], [0, 1], ranks=3, config=config)
    assert sorted(sum(map(len, part)) for part in plan) == [0, 1, 1]
    assert {len(part) for part in plan} == {1}
