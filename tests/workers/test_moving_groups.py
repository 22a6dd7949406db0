"""Groups that change their worker while they are generated, and come back."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import PromptGroup
from rlinf.engines.config import HFEngineConfig, SamplingConfig
from rlinf.engines.protocol import Engine, ModelSource
from rlinf.workers.group_book import PositionBook, completion_seed

GROUP, POSITIONS, LIMIT = 4, 5, 40
SAMPLING = SamplingConfig(max_new_tokens=LIMIT)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    config = transformers.Qwen2Config(
        vocab_size=37,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.15,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


def engine(model: Any, *, deterministic: bool = True, **keys: Any) -> Engine:
    blocks = {"block_size": 4} if deterministic else {}
    keys = {"deterministic": deterministic, "max_running_requests": 16, **blocks, **keys}
    return HFEngineConfig(**keys).build(ModelSource(module=model))


def new_book() -> PositionBook:
    def seeds(draw: int) -> list[int]:
        return [completion_seed(7, draw, place) for place in range(GROUP)]

    return PositionBook(GROUP, SAMPLING, seeds)


def begin(book: PositionBook, on: Engine) -> None:
    rng = np.random.default_rng(0)
    prompts = {}
    for position in range(POSITIONS):
        tokens = rng.integers(2, 37, 6)
        # A draw is no position.
        prompts[position] = (
            position + 90,
            Prompt(prompt_id=position, text="", tokens=tokens, answer=None),
        )
    for request in book.begin(prompts):
        on.submit(request)


def generate(book: PositionBook, on: Engine, steps: int) -> dict[int, PromptGroup]:
    found: dict[int, PromptGroup] = {}
    for _ in range(steps):
        for group in book.take(on.step()):
            position = book.source(group.draw)
            assert position not in found
            found[position] = group
    return found


def hand_over(
    giver: PositionBook, off: Engine, taker: PositionBook, on: Engine, *, carried: bool
) -> int:
    taken_out = off.interrupt() if carried else off.abort()
    moved = pickle.loads(pickle.dumps(giver.give(taken_out)))
    assert carried == any(cache is not None for group in moved for cache in group.caches)
    assert off.unfinished == 0
    for group in moved:
        requests = taker.adopt(group)
        assert len(requests) == group.group.unfinished
        for request in requests:
            on.submit(request)
    return sum(group.group.unfinished for group in moved)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("carried", [True, False])
def test_groups_are_the_same_after_leaving_and_coming_back(
    model: Any, deterministic: bool, carried: bool
) -> None:
    alone = new_book()
    with engine(model, deterministic=deterministic) as only:
        begin(alone, only)
        expected = generate(alone, only, 120)
    assert len(expected) == POSITIONS
    first, second = new_book(), new_book()
    with (
        engine(model, deterministic=deterministic) as one,
        # Some wait for a place there, with what was computed of them.
        engine(model, deterministic=deterministic, max_running_requests=6) as other,
    ):
        begin(first, one)
        found = generate(first, one, 7)
        moved = hand_over(first, one, second, other, carried=carried)
        assert moved > POSITIONS
        found |= generate(second, other, 9)
        back = hand_over(second, other, first, one, carried=carried)
        assert 0 < back <= moved
        found |= generate(first, one, 120)
        assert one.unfinished == other.unfinished == 0
    assert found.keys() == expected.keys()
    for position, group in expected.items():
        for mine, theirs in zip(found[position].completions, group.completions, strict=True):
            assert np.array_equal(mine.tokens, theirs.tokens)
            assert mine.stop_reason == theirs.stop_reason
            assert mine.seed == theirs.seed
            if deterministic:
                assert np.array_equal(mine.log_probs, theirs.log_probs)
            else:
                np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-5)
    counted = [first.report, second.report]
    sampled = sum(len(c) for group in expected.values() for c in group.completions)
    assert sum(report.tokens for report in counted) == sampled
    assert sum(report.completions for report in counted) == POSITIONS * GROUP
    assert first.unfilled  # scores come to the worker whose positions they are
    assert not second.unfilled
    for group in found.values():
        assert first.score(group) == []
    assert not first.unfilled
    assert dict(first.filled()) == found


def test_bounds_are_below_what_groups_become(model: Any) -> None:
    book = new_book()
    with engine(model, max_running_requests=6) as only:
        begin(book, only)
        seen: list[dict[int, int]] = []
        while only.unfinished:
            seen.append(book.bounds(only.progress()))
            book.take(only.step())
    assert set(seen[0]) == set(range(POSITIONS))
    for before, after in pairwise(seen):
        assert all(before[position] <= after[position] for position in after)
    for bounds in seen:
        assert all(bound <= book.complete[position] for position, bound in bounds.items())
    assert max(max(bounds.values()) for bounds in seen) >= LIMIT - 1
