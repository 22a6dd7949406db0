"""The order of prompts: complete epochs, another order in each, exactly resumed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.data.prompts.loader import PromptLoader
from rlinf.data.prompts.prompt_files import LoadingReport
from rlinf.errors import CheckpointError


def dataset(n, text="p"):
    prompts = tuple(
        Prompt(prompt_id=i, text=f"{text}{i}", tokens=np.array([i]), answer=[i]) for i in range(n)
    )
    return PromptDataset(prompts, LoadingReport(records=n, prompts=n))


def ids(drawn):
    return [prompt.prompt_id for _, prompt in drawn]


def test_every_epoch_has_every_prompt_once_in_another_order():
    loader = PromptLoader(dataset(10), seed=3)
    first, second = ids(loader.take(10)), ids(loader.take(10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))
    assert loader.epoch == 2
    assert ids(PromptLoader(dataset(10), seed=4).take(10)) != first


def test_without_shuffle_the_order_is_that_of_the_set():
    assert ids(PromptLoader(dataset(3), shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=6), st.integers(0, 20))
def test_a_resumed_loader_draws_what_an_uninterrupted_one_does(n, pieces, after):
    data = dataset(n)
    whole = PromptLoader(data, seed=1).take(sum(pieces) + after)
    loader = PromptLoader(data, seed=1)
    drawn = [entry for piece in pieces for entry in loader.take(piece)]
    resumed = PromptLoader(data, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    drawn += resumed.take(after)
    assert drawn == whole
    assert [draw for draw, _ in drawn] == list(range(len(whole)))
    assert resumed.drawn == len(whole)


def test_any_draw_can_be_looked_up():
    loader = PromptLoader(dataset(5), seed=2)
    drawn = loader.take(12)
    assert [(draw, loader.at(draw)) for draw in reversed(range(12))] == drawn[::-1]
    assert loader.drawn == 12


def test_what_is_passed_over_comes_first():
    loader = PromptLoader(dataset(5), seed=2)
    assert [draw for draw, _ in loader.take(2)] == [0, 1]
    coming = loader.coming(6)
    assert [draw for draw, _ in coming] == [2, 3, 4, 5, 6, 7]
    assert loader.drawn == 2, "looking ahead draws nothing"
    loader.use([6, 3])
    assert loader.drawn == 4
    assert loader.take(5) == [(draw, loader.at(draw)) for draw in (2, 4, 5, 7, 8)]
    with pytest.raises(ValueError, match="draw 4 was drawn before"):
        loader.use([4])


@given(st.lists(st.sets(st.integers(0, 14)), max_size=6), st.integers(0, 6))
def test_no_draw_is_lost_or_doubled(chosen, cut):
    """Whatever is used of what is coming, with a checkpoint in between."""
    loader = PromptLoader(dataset(4), seed=1)
    drawn = []
    for number, places in enumerate(chosen):
        if number == cut:
            state = json.loads(json.dumps(loader.state_dict()))
            loader = PromptLoader(dataset(4), seed=1)
            loader.load_state_dict(state)
        drawn += [draw for draw, _ in loader.take(2)]
        coming = loader.coming(15)
        used = [coming[place][0] for place in places]
        loader.use(used)
        drawn += used
    assert len(set(drawn)) == len(drawn) == loader.drawn
    most = max(drawn, default=-1) + 1
    missing = sorted(set(range(most)) - set(drawn))
    assert [draw for draw, _ in loader.take(len(missing) + 1)] == [*missing, most]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (PromptLoader(dataset(5, "q"), seed=2), "the prompts changed"),
        (PromptLoader(dataset(6), seed=2), "the prompts changed"),
        (PromptLoader(dataset(5), seed=3), "the seed of the order changed.*has 2"),
        (PromptLoader(dataset(5), seed=2, shuffle=False), "shuffle changed.*has True"),
    ],
)
def test_another_order_or_set_is_refused(other, reason):
    state = PromptLoader(dataset(5), seed=2).state_dict()
    with pytest.raises(CheckpointError, match=reason):
        other.load_state_dict(state)
    assert other.drawn == 0


def test_an_empty_or_misnumbered_set_is_refused():
    with pytest.raises(ValueError, match="no row"):
        PromptLoader(dataset(0))
    with pytest.raises(ValueError, match="numbered from 0"):
        PromptDataset(dataset(3).prompts[1:], LoadingReport(records=2, prompts=2))
