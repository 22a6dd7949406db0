"""Runs a scenario of this module in two processes of which one or both train."""

from __future__ import annotations

import pickle
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.trainers.language import rescale, transfer
from rlinf.trainers.language.company import Company, MoveFailed, _keys_of
from tests.trainers.language.models import algorithm, model, random_batch, trainer
from tests.trainers.language.processes import results_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, reference": {"keys": {"kl_beta": 0.1}},
    "bfloat16": {"precision": {"param": "bfloat16"}},
    "bfloat16, reference": {"keys": {"kl_beta": 0.1}, "precision": {"param": "bfloat16"}},
    "adapter": {"lora": {"rank": 4}},
}
OPTIM = {"lr": 1e-3, "max_grad_norm": 1.0}


def batches(count: int) -> list[Any]:
    """Prepared batches of an odd number of sequences, which the first weights sampled."""
    first = trainer(model())
    made = []
    for number in range(count):
        batch = random_batch(13, group_size=4, seed=number)
        sampled = first.log_probs(batch)
        batch = replace(batch, rollout_log_probs=sampled, old_log_probs=sampled, version=0)
        made.append(algorithm("grpo").prepare(batch)[0])
    return made


def build(case: str) -> Any:
    config = dict(CASES[case])
    keys = config.pop("keys", None)
    return trainer(model(), keys=keys, max_tokens_per_micro_batch=40, optim=OPTIM, **config)


def fixed(case: str, count: int = 5) -> dict[str, Any]:
    """What one process computes without any move."""
    one = build(case)
    return outcome(one, [one.train_stream(batches(count), 3)])


def outcome(one: Any, metrics: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "metrics": metrics,
        "state": one.state_dict(),
        "trained": one._core.trained.state_dict(keep=True, copy=True),
    }


def moving(company: Company, case: str) -> dict[str, Any] | None:
    """One phase in which the number of ranks is 1, 2 and 1 again."""
    one, found = build(case), batches(5)
    one.make_movable(keep=company.rank == 0)
    moved: list[float] = []

    def stream(first: int) -> Any:
        for number in range(first, 5):
            if number == 1:
                moved.append(company.move(one, 1, 2).seconds)
            if number == 4:
                moved.append(company.move(one, 2, 1).seconds)
                if company.rank == 1:
                    return
            yield found[number]

    if company.rank == 0:
        metrics = one.train_stream(stream(0), 3)
        assert len(moved) == 2
        return outcome(one, [metrics])
    assert not one.has_part
    moved.append(company.move(one, 1, 2).seconds)
    one.train_stream(_from(stream, found), 3)
    assert not one.has_part
    return None


def _from(stream: Any, found: list[Any]) -> Any:
    """What a rank that joined before batch 1 trains on."""
    yield found[1]
    yield from stream(2)


def moves(company: Company, folder: Path) -> dict[str, Any]:
    """All cases."""
    return {case: moving(company, case) for case in CASES}


def again(company: Company, folder: Path) -> dict[str, Any]:
    """Two ranks for a second time, when the groups of the first are gone; each gathers twice."""
    one, found = build("tied, reference"), batches(2)
    one.make_movable(keep=company.rank == 0)
    company.move(one, 1, 2)
    one.train_stream(found[:1], 3)
    weights = [dict(one.weights())]
    company.move(one, 2, 1)
    company.move(one, 1, 2)
    weights.append(dict(one.weights()))
    one.train_stream(found[1:], 4)
    state = one.state_dict()
    if company.rank == 0:
        torch.save(state, folder / "state.pt")
    one._ranks.barrier()
    one.load_state_dict(torch.load(folder / "state.pt"))
    weights.append(dict(one.weights()))
    return {"weights": weights, "state": state}


def failing(company: Company, folder: Path) -> dict[str, Any]:
    """Moves that fail in each phase and direction, on each rank, and one that does not."""
    one = build("tied, reference")
    one.make_movable(keep=company.rank == 0)
    found = batches(4)
    one_run = transfer.Transfer.run
    messages = []

    def attempt(before: int, after: int, phase: str, rank: int) -> None:
        def broken(*arguments: Any, **more: Any) -> Any:
            raise OSError(f"no memory while {phase}")

        name = {"preparing": (rescale.Skeleton, "build"), "moving": (transfer.Transfer, "run")}
        owner, method = name[phase]
        if company.rank == rank and (after > before or phase == "moving"):
            kept = getattr(owner, method)
            setattr(owner, method, broken)
        else:
            kept = None
        try:
            company.move(one, before, after)
            messages.append("moved")
        except MoveFailed as error:
            messages.append(str(error))
        finally:
            if kept is not None:
                setattr(owner, method, kept)

    if company.rank == 0:
        one.train_stream(found[:1], 3)
    for phase in ("preparing", "moving"):
        for rank in range(2):
            attempt(1, 2, phase, rank)
    if company.rank == 0:
        one.train_stream(found[1:2], 4)
    attempt(1, 2, "moving", -1)
    one.train_stream(found[2:3], 5)
    for rank in range(2):
        attempt(2, 1, "moving", rank)
    one.train_stream(found[3:4], 6)
    attempt(2, 1, "moving", -1)
    assert transfer.Transfer.run is one_run
    kept = [n for n in range(8) for k in _keys_of(n, 2) if company._store.check([k])]
    assert set(kept) <= {7}
    if company.rank == 1:
        return {"messages": messages}
    return {"messages": messages, **outcome(one, [])}


def run(function: str, directory: Path) -> list[Any]:
    """What a scenario returns in each of two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return results_of(__name__, lambda rank: (function, rank, port, directory), seconds=90)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, number, port, folder = sys.argv[1:]
    together = Company(int(number), 2, rendezvous=f"tcp://127.0.0.1:{port}", timeout_s=20)
    result = globals()[name](together, Path(folder))
    together.close()
    sys.stdout.buffer.write(pickle.dumps(result))
