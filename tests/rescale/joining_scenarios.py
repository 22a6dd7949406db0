"""Runs a scenario of this module in several processes of which some or all train."""

from __future__ import annotations

import copy
import pickle
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.rescale import movable_trainer
from rlinf.rescale.joining_ranks import JoiningRanks, MoveFailed, _keys_of
from rlinf.rescale.movable_trainer import MovableTrainer
from tests.trainers.language_models import algorithm, model, random_batch, trainer
from tests.trainers.processes import results_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, reference": {"keys": {"kl_beta": 0.1}},
    "bfloat16": {"precision": {"param": "bfloat16"}},
    "bfloat16, reference": {"keys": {"kl_beta": 0.1}, "precision": {"param": "bfloat16"}},
    "adapter": {"lora": {"rank": 4}},
}
TWO = (1, 2, 2, 2, 1)
"""Ranks that train on each batch."""
FOUR = (1, 2, 4, 3, 4, 1, 3, 3, 2, 1)
OPTIM = {"lr": 1e-3, "max_grad_norm": 1.0}


def batches(count: int) -> list[Any]:
    """Prepared batches of an odd number of sequences, which the first weights sampled."""
    first = trainer(model())
    made = []
    for number in range(count):
        batch = random_batch(13, group_size=4, seed=number)
        sampled = first.log_probs(batch)
        batch = replace(batch, log_probs=sampled, proximal_log_probs=sampled, version=0)
        made.append(algorithm("grpo").prepare(batch)[0])
    return made


def build(case: str) -> Any:
    config = dict(CASES[case])
    keys = config.pop("keys", None)
    return trainer(model(), keys=keys, max_tokens_per_micro_batch=40, optim=OPTIM, **config)


def fixed(case: str, count: int) -> dict[str, Any]:
    """What one process computes without any move."""
    one = build(case)
    return outcome(one, [one.train(batches(count), 3)])


def outcome(one: Any, metrics: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "metrics": metrics,
        "state": one.state_dict(),
        "trained": one.modules.held["policy"].state_dict(keep=True, copy=True),
    }


def moving(ranks: JoiningRanks, case: str, sizes: tuple[int, ...]) -> dict[str, Any] | None:
    """One phase in which the number of ranks changes."""
    one, found, metrics, at = build(case), batches(len(sizes)), [], 0
    movable = MovableTrainer(one, keep=ranks.rank == 0)

    def goes_on() -> bool:
        """Come to the next batch, if there is one."""
        nonlocal at
        at += 1
        if at < len(sizes) and sizes[at - 1] != sizes[at]:
            ranks.move(movable, sizes[at - 1], sizes[at])
        return at < len(sizes)

    def stream() -> Any:
        """From the batch at which this rank joins to the one before which it leaves."""
        yield found[at]
        while goes_on() and movable.has_part:
            yield found[at]

    while at < len(sizes):
        assert movable.has_part == (ranks.rank < sizes[at])
        if movable.has_part:
            metrics.append(one.train(stream(), 3))
        else:
            goes_on()
    if ranks.rank > 0:
        assert not movable.has_part
        return None
    assert len(metrics) == 1
    return outcome(one, metrics)


def moves(ranks: JoiningRanks, folder: Path) -> dict[str, Any]:
    """All cases, with two ranks at most."""
    return {case: moving(ranks, case, TWO) for case in CASES}


def many_moves(ranks: JoiningRanks, folder: Path) -> dict[str, Any]:
    """Up to four ranks, also three, which divide no layer evenly; they leave and join again.

    Messages are so short that some weights travel alone, and others in several together.
    """
    movable_trainer._TOGETHER = 300
    return {case: moving(ranks, case, FOUR) for case in CASES}


def again(ranks: JoiningRanks, folder: Path) -> dict[str, Any]:
    """Two ranks for a second time, when the groups of the first are gone; each gathers twice."""
    one, found = build("tied, reference"), batches(2)
    movable = MovableTrainer(one, keep=ranks.rank == 0)
    ranks.move(movable, 1, 2)
    one.train(found[:1], 3)
    weights = [dict(one.weights())]
    ranks.move(movable, 2, 1)
    ranks.move(movable, 1, 2)
    weights.append(dict(one.weights()))
    one.train(found[1:], 4)
    state = one.state_dict()
    if ranks.rank == 0:
        torch.save(state, folder / "state.pt")
    one.ranks.barrier()
    one.load_state_dict(torch.load(folder / "state.pt"))
    weights.append(dict(one.weights()))
    return {"weights": weights, "state": state}


def saving(ranks: JoiningRanks, folder: Path) -> dict[str, Any]:
    """Two of three ranks write their parts; one that has all then reads them."""
    one, found = build("tied, reference"), batches(1)
    movable = MovableTrainer(one, keep=ranks.rank == 0)
    if ranks.rank == 0:
        one.train(found, 3)
    ranks.move(movable, 1, 2)
    written = [path.name for path in one.save_sharded(folder)] if movable.has_part else []
    ranks.move(movable, 2, 1)
    if not movable.has_part:
        return {"written": written}
    before = copy.deepcopy(one.state_dict())
    other = build("tied, reference")
    other.load_sharded(folder)
    return {"written": written, "before": before, "after": other.state_dict()}


def failing(ranks: JoiningRanks, folder: Path) -> dict[str, Any]:
    """Moves that fail in each phase and direction, on each rank, and one that does not."""
    movable_trainer._TOGETHER = 300
    one = build("tied, reference")
    movable = MovableTrainer(one, keep=ranks.rank == 0)
    found = batches(4)
    one_run = movable_trainer.Transfer.run
    messages = []

    def attempt(before: int, after: int, phase: str, rank: int) -> None:
        def broken(*arguments: Any, **more: Any) -> Any:
            raise OSError(f"no memory while {phase}")

        name = {
            "preparing": (movable_trainer.Skeleton, "build"),
            "moving": (movable_trainer.Transfer, "run"),
        }
        owner, method = name[phase]
        if ranks.rank == rank and (after > before or phase == "moving"):
            kept = getattr(owner, method)
            setattr(owner, method, broken)
        else:
            kept = None
        try:
            ranks.move(movable, before, after)
            messages.append("moved")
        except MoveFailed as error:
            messages.append(str(error))
        finally:
            if kept is not None:
                setattr(owner, method, kept)

    if ranks.rank == 0:
        one.train(found[:1], 3)
    for phase in ("preparing", "moving"):
        for rank in range(2):
            attempt(1, 2, phase, rank)
    if ranks.rank == 0:
        one.train(found[1:2], 4)
    attempt(1, 2, "moving", -1)
    one.train(found[2:3], 5)
    for rank in range(2):
        attempt(2, 1, "moving", rank)
    one.train(found[3:4], 6)
    attempt(2, 1, "moving", -1)
    assert movable_trainer.Transfer.run is one_run
    kept = [n for n in range(8) for k in _keys_of(n, 2) if ranks._store.check([k])]
    assert set(kept) <= {7}
    if ranks.rank == 1:
        return {"messages": messages}
    return {"messages": messages, **outcome(one, [])}


def run(function: str, directory: Path, count: int = 2) -> list[Any]:
    """What a scenario returns in each of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return results_of(
        __name__, lambda rank: (function, rank, count, port, directory), seconds=180, count=count
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, number, count, port, folder = sys.argv[1:]
    store = torch.distributed.TCPStore("127.0.0.1", int(port), is_master=number == "0")
    together = JoiningRanks(int(number), int(count), store=store, timeout_s=20)
    result = globals()[name](together, Path(folder))
    together.close()
    sys.stdout.buffer.write(pickle.dumps(result))
