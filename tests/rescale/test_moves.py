"""The number of ranks of a trainer changes between optimizer steps."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.errors import RLinfError
from rlinf.rescale import movable_trainer
from rlinf.rescale.joining_ranks import JoiningRanks, MoveFailed, _Trial
from rlinf.rescale.movable_trainer import Transfer, pieces, rows_of
from tests.rescale import joining_scenarios

KINDS = ("master", "exp_avg", "exp_avg_sq")
ABSOLUTE, RELATIVE = 2e-5, 1e-4
"""Bound of what rounding changes: two ranks add the same float32 numbers in another order, and Adam
divides by the root of the second moment."""


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 19])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 3), (3, 8), (8, 1)])
def test_every_row_arrives_once_from_who_has_it(rows: int, before: int, after: int) -> None:
    sources, targets = [], []
    for piece in pieces(rows, before, after):
        moved = range(piece.start, piece.stop)
        sources += [(piece.source, row) for row in moved]
        targets += [(piece.target, row) for row in moved]
    has = [(rank, row) for rank in range(before) for row in rows_of(rows, before, rank)]
    wants = [(rank, row) for rank in range(after) for row in rows_of(rows, after, rank)]
    assert sorted(sources) == sorted(has)
    assert sorted(targets) == sorted(wants)


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rows_are_those_of_torch(rows: int, size: int) -> None:
    whole = torch.arange(rows)
    chunks = list(torch.chunk(whole, size))
    for rank in range(size):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(rows_of(rows, size, rank)) == expected


def test_bytes_are_counted_as_they_travel() -> None:
    """In float32, whatever the trainer keeps."""
    one = joining_scenarios.build("bfloat16, reference")
    trained = one.modules.held["policy"]
    assert trained.used()[0].dtype == torch.bfloat16
    sent = Transfer(trained, None, (one.parts[1], None), sizes=(1, 2), rank=0).bytes_sent
    # Weights, two moments and the reference.
    numbers = sum(p[-(-len(p) // 2) :].numel() for p in trained.named.values())
    assert sent == 4 * 4 * numbers


@pytest.mark.parametrize("most", [1, 300, 2**18])
def test_both_sides_of_a_way_find_the_same_messages(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two to three ranks: the first gives a sixth to the second, which gives a third on."""
    monkeypatch.setattr(movable_trainer, "_TOGETHER", most)
    one = joining_scenarios.build("tied, reference")
    trained, references = one.modules.held["policy"], (one.parts[1], one.parts[1])
    first, second, third = (
        # What travels depends on shapes alone, so that each may have the whole here.
        Transfer(trained, trained, references, sizes=(2, 3), rank=rank)._messages()
        for rank in range(3)
    )
    assert [*first, *third] == sorted(second, key=lambda message: message.source)
    assert {(m.source, m.target) for m in second} == {(0, 1), (1, 2)}
    pieces_sent = [piece for message in second for piece in message.pieces]
    assert len(pieces_sent) == len(set(pieces_sent)) > 40
    assert all(m.numbers <= most or len(m.pieces) == 1 for m in second)
    assert len(second) == {1: len(pieces_sent), 2**18: 2}.get(most, len(second))
    if most == 300:
        assert any(m.numbers > most for m in second)
        assert any(len(m.pieces) > 1 for m in second)


def test_the_verdict_on_a_move_is_the_same_for_all() -> None:
    """Also where rank 0 is late, and another one later than a rank waits for it."""
    store, seconds = torch.distributed.HashStore(), 0.6
    arrives = {0: 0.3, 1: 0.0, 2: 0.75}

    def take_part(rank: int) -> str:
        ranks: Any = object.__new__(JoiningRanks)
        ranks.rank, ranks._store = rank, store
        ranks._timeout = timedelta(seconds=seconds)
        time.sleep(arrives[rank])
        try:
            ranks._agree(_Trial(0, 3, None, None), "prepared", None)
        except MoveFailed as error:
            return str(error)
        return "ok"

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(take_part, range(3))) == ["ok"] * 3


def test_an_offer_is_forgotten_with_the_next() -> None:
    ranks: Any = object.__new__(JoiningRanks)
    ranks.rank, ranks.world_size, ranks._offer = 1, 2, None
    ranks._store = torch.distributed.HashStore()
    for phase in (3, 3, 4):
        ranks.offer(phase)
        assert ranks.offered(phase) == 2
    assert ranks.offered(3) == 1


class Malicious:
    """Pickled, it makes a file of whoever unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "written",
    [
        b'{"kind": "run", "size": 1, "before": 1, "done": 0}',
        b'{"kind": "move", "size": 0, "before": 1, "done": 0}',
        b'{"kind": "move", "size": 3, "before": 1, "done": 0}',
        None,
    ],
)
def test_what_somebody_else_wrote_into_the_store_is_refused_and_never_run(
    tmp_path: Path, written: bytes | None
) -> None:
    ranks: Any = object.__new__(JoiningRanks)
    ranks.rank, ranks.world_size, ranks._read = 1, 2, 0
    ranks._store = torch.distributed.HashStore()
    file = tmp_path / "run"
    ranks._store.set("instruction/0", pickle.dumps(Malicious(file)) if written is None else written)
    with pytest.raises(RLinfError):
        ranks.next_instruction(lambda: None)
    assert not file.exists()
    assert written or pickle.loads(pickle.dumps(Malicious(file))) is None
    assert file.exists() == (written is None)


@pytest.fixture(scope="module", params=[("moves", 2), ("many_moves", 4)], ids=["two", "four"])
def moved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any]]:
    name, count = request.param
    results = joining_scenarios.run(name, tmp_path_factory.mktemp(name), count)
    sizes = joining_scenarios.TWO if count == 2 else joining_scenarios.FOUR
    return len(sizes), dict(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", joining_scenarios.CASES)
def test_a_changing_number_of_ranks_gives_what_one_gives(
    moved: tuple[int, dict[str, Any]], case: str
) -> None:
    count, cases = moved
    expected, found = joining_scenarios.fixed(case, count), cases[case]
    half = case.startswith("bfloat16")
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in set() if half else mine.keys() - {"actor/tokens"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert found["trained"]["steps"] == expected["trained"]["steps"] == count
    for kind in KINDS:
        for name, tensor in expected["trained"][kind].items():
            there = found["trained"][kind][name]
            if half:
                assert (there - tensor).abs().mean() < 0.15 * tensor.abs().mean() + 1e-3, name
            elif "k_proj.bias" not in name:  # its gradient is rounding alone, and Adam scales that
                torch.testing.assert_close(there, tensor, atol=ABSOLUTE, rtol=RELATIVE)
    assert found["state"]["version"] == expected["state"]["version"]
    reference = expected["state"]["reference"]
    for name, tensor in ({} if reference is None else reference["weights"]).items():
        assert torch.equal(found["state"]["reference"]["weights"][name], tensor), name


@pytest.mark.slow
def test_all_is_gathered_by_ranks_that_train_together_for_a_second_time(tmp_path: Path) -> None:
    """Torch keeps results of operations by device meshes that are equal, whatever groups they have:
    those of the first time were of a group that is gone.
    """
    first, second = joining_scenarios.run("again", tmp_path)
    one = joining_scenarios.build("tied, reference")
    found = joining_scenarios.batches(2)
    one.train(found[:1], 3)
    after_one = {name: tensor.clone() for name, tensor in one.weights()}
    one.train(found[1:], 4)
    after_two = dict(one.weights())
    for rank in (first, second):
        expected = (after_one, after_one, after_two)
        for there, here in zip(rank["weights"], expected, strict=True):
            assert there.keys() == here.keys()
            for name, tensor in here.items():
                if "k_proj.bias" not in name:  # its gradient is rounding alone
                    torch.testing.assert_close(
                        there[name], tensor, atol=ABSOLUTE, rtol=RELATIVE, msg=name
                    )
    assert first["state"]["modules"]["policy"]["steps"] == 2


@pytest.mark.slow
def test_ranks_that_have_parts_save_them_without_the_others(tmp_path: Path) -> None:
    first, second, third = joining_scenarios.run("saving", tmp_path, 3)
    assert first["written"] == ["__0_0.distcp", ".metadata"]
    assert second["written"] == ["__1_0.distcp"]
    assert third["written"] == []
    before, after = first["before"]["modules"]["policy"], first["after"]["modules"]["policy"]
    assert before["steps"] == after["steps"] == 1
    for kind in KINDS:
        for name, tensor in before[kind].items():
            assert torch.equal(after[kind][name], tensor), name


@pytest.mark.slow
def test_a_move_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    first, second = joining_scenarios.run("failing", tmp_path)
    failed = [message for message in first["messages"] if message != "moved"]
    assert first["messages"] == second["messages"]
    assert len(first["messages"]) == 8
    assert [message == "moved" for message in first["messages"]] == [False] * 4 + [
        True, False, False, True,
    ]  # fmt: skip
    for message, rank in zip(failed, (0, 1, 0, 1, 0, 1), strict=True):
        assert f"rank {rank}: OSError: no memory while" in message
        assert message.count("OSError") == 1
    one = joining_scenarios.build("tied, reference")
    for step, batch in enumerate(joining_scenarios.batches(4), start=3):
        one.train([batch], step)
    for kind in KINDS:
        for name, tensor in one.state_dict()["modules"]["policy"][kind].items():
            if "k_proj.bias" not in name:
                torch.testing.assert_close(
                    first["state"]["modules"]["policy"][kind][name],
                    tensor,
                    atol=ABSOLUTE,
                    rtol=RELATIVE,
                )
