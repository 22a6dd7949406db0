from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.checkpoint.tree import decode, encode
from rlinf.data.replay import ReplayStore, draws


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + count)
    return {
        "states": numbers.float().unsqueeze(1).expand(count, 2).clone(),
        "main_images": (numbers % 256).to(torch.uint8).view(count, 1, 1, 1),
        "versions": numbers,
    }


def test_the_oldest_rows_make_room() -> None:
    store = ReplayStore(5)
    for first, count in ((0, 3), (3, 4), (7, 1)):
        store.append(rows(first, count))
    assert len(store) == 5
    kept = store.at(torch.arange(5))
    assert kept["versions"].tolist() == [3, 4, 5, 6, 7]
    assert kept["states"][:, 1].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert kept["main_images"].dtype == torch.uint8
    store.append(rows(100, 12))  # more than it holds
    assert store.at(torch.arange(5))["versions"].tolist() == [107, 108, 109, 110, 111]


def test_draws_are_uniform_and_a_function_of_seed_and_step() -> None:
    store = ReplayStore(8)
    store.append(rows(0, 10))
    drawn = store.sample(20_000, draws(3, 7))["versions"]
    counts = torch.bincount(drawn, minlength=10)
    assert counts[:2].tolist() == [0, 0]
    assert bool(((counts[2:] - 2500).abs() < 5 * 2500**0.5).all())
    assert torch.equal(drawn, store.sample(20_000, draws(3, 7))["versions"])
    assert not torch.equal(drawn, store.sample(20_000, draws(3, 8))["versions"])
    assert not torch.equal(drawn, store.sample(20_000, draws(4, 7))["versions"])
    # Exploration is drawn from (seed, step, part), where zeros at the end change nothing.
    same = [np.random.SeedSequence(words).generate_state(1)[0] for words in ((3, 7), (3, 7, 0))]
    assert same[0] == same[1]
    states = np.random.SeedSequence((3, 7)).generate_state(1, np.uint64)
    assert draws(3, 7).initial_seed() != int(states[0] >> np.uint64(1))


def test_a_resumed_store_goes_on_to_the_bit() -> None:
    store, other = ReplayStore(6), ReplayStore(6)
    store.append(rows(0, 9))
    other.load_state_dict(store.state_dict())
    for first in (9, 13):
        for each in (store, other):
            each.append(rows(first, 4))
        left, right = (each.sample(32, draws(0, first)) for each in (store, other))
        assert all(torch.equal(left[name], right[name]) for name in left)
    empty = ReplayStore(6)
    empty.load_state_dict(ReplayStore(6).state_dict())
    assert len(empty) == 0


@pytest.mark.parametrize("count", [4, 6, 9])
def test_a_checkpoint_copies_the_rows_once(count: int) -> None:
    store = ReplayStore(6)
    store.append(rows(0, count))
    whole = store.at(torch.arange(len(store)))
    state = store.state_dict()
    parts = list(state.values())
    assert sum(len(part["versions"]) for part in parts) == min(count, 6)
    snapshot = encode(state)
    store.append(rows(50, 6))
    # The state is no copy: it lies in the ring, which has other rows now.
    assert all(bool((part["versions"] >= 50).all()) for part in parts)
    restored = decode(snapshot.structure, snapshot.tensors())
    for read in (restored, {"rows": whole}):  # the second as older checkpoints have it
        for capacity in (6, 3):
            other = ReplayStore(capacity)
            other.load_state_dict(read)
            wanted = whole["versions"][-capacity:]
            assert torch.equal(other.at(torch.arange(len(other)))["versions"], wanted)


def test_what_does_not_fit_is_refused() -> None:
    store = ReplayStore(4)
    with pytest.raises(ValueError, match="nothing was appended"):
        store.sample(1, draws(0, 0))
    store.append(rows(0, 1))
    for changed in (
        {"states": torch.zeros(2, 3), "versions": torch.zeros(2, dtype=torch.int64)},
        {**rows(0, 2), "states": torch.zeros(2, 3)},
        {**rows(0, 2), "versions": torch.zeros(2)},
    ):
        with pytest.raises(ValueError, match="rows differ from those before"):
            store.append(changed)
